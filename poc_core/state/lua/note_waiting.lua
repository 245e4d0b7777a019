-- Notes what a running job waits for.
-- KEYS: 1 job. ARGV: 1 what, or '' when it goes on, 2 ttl. Returns 1 while the job is active and no round has its workers, else 0.
local fields = redis.call('HMGET', KEYS[1], 'status', 'model')
if not is_active(fields[1]) or redis.call('EXISTS', 'poc:round:generating:' .. fields[2]) == 1 then
  return 0
end
if ARGV[1] == '' then
  redis.call('HDEL', KEYS[1], 'waiting_for')
else
  redis.call('HSET', KEYS[1], 'waiting_for', ARGV[1])
end
touch(KEYS[1], ARGV[2])
return 1
