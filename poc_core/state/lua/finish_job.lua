-- Completes a job whose batches are all done, exactly once.
-- KEYS: 1 job. ARGV: 1 result, 2 now, 3 ttl of the result, 4 url of its callback or '', 5 body of that, 6 ttl of that.
-- Returns 1 for the call that completed it, else 0.
local job = KEYS[1]
if not is_active(redis.call('HGET', job, 'status')) or redis.call('SCARD', job .. ':todo') > 0 then
  return 0
end
redis.call('HSET', job, 'result', ARGV[1])
retire(job, 'completed', ARGV[2], ARGV[3])
-- In the same atomic step: exactly once, and never without the result.
if ARGV[4] ~= '' then
  local id = string.sub(job, #'poc:job:' + 1)
  redis.call('HSET', 'poc:outbox:' .. id, 'url', ARGV[4], 'closed', '1')
  push_outbox(id, ARGV[5], 1, ARGV[2], ARGV[6])
  redis.call('SADD', 'poc:outbox:jobs', id)
  redis.call('EXPIRE', 'poc:outbox:jobs', ARGV[6])
end
return 1
