-- Fails or cancels a job that is queued or running.
--
-- KEYS: 1 job            its hash; its working keys are this plus a suffix
-- ARGV: 1 status         failed or cancelled
--       2 why            reason of a failure, or ''
--       3 now            seconds since the epoch
--       4 ttl            seconds the job is kept
--       5 unavailable    '1' if this node lacks values for a verdict, which another node may have
-- Returns 1 if this call ended the job, else 0.
local job = KEYS[1]
local status, why, now, ttl, unavailable = unpack(ARGV)
if not is_active(redis.call('HGET', job, 'status')) then
  return 0
end
if why ~= '' then
  redis.call('HSET', job, 'error', why)
end
if unavailable == '1' then
  redis.call('HSET', job, 'unavailable', '1')
end
retire(job, status, now, ttl)
return 1
