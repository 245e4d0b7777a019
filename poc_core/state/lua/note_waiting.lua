-- Notes what a job waits for.
--
-- KEYS: 1 job     its hash; its working keys are this plus a suffix
-- ARGV: 1 what    or '' when it goes on
--       2 ttl     seconds the job is kept without progress
-- Returns 1 while the job is active and no round has its workers, else 0.
local job = KEYS[1]
local what, ttl = unpack(ARGV)
local status, model = unpack(redis.call('HMGET', job, 'status', 'model'))
if not is_active(status) or redis.call('EXISTS', 'poc:round:generating:' .. model) == 1 then
  return 0
end
if what == '' then
  redis.call('HDEL', job, 'waiting_for')
else
  redis.call('HSET', job, 'waiting_for', what)
end
touch(job, ttl)
return 1
