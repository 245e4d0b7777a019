-- Fails or cancels a job that is queued or running.
-- KEYS: 1 job. ARGV: 1 status, 2 error or '', 3 now, 4 ttl.
-- Returns 1 for the call that ended it, else 0.
local job = KEYS[1]
if not is_active(redis.call('HGET', job, 'status')) then
  return 0
end
if ARGV[2] ~= '' then
  redis.call('HSET', job, 'error', ARGV[2])
end
retire(job, ARGV[1], ARGV[3], ARGV[4])
return 1
