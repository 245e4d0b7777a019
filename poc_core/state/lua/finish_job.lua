-- Completes a job whose batches are all done, exactly once.
--
-- KEYS: 1 job            its hash; its working keys are this plus a suffix
-- ARGV: 1 result         the answer, as JSON
--       2 now            seconds since the epoch
--       3 ttl            seconds the result is kept
--       4 url            of its callback, or ''
--       5 body           of that callback
--       6 callback_ttl   seconds that it is kept
-- Returns 1 for the call that completed it, else 0.
local job = KEYS[1]
local result, now, ttl, url, body, callback_ttl = unpack(ARGV)
if not is_active(redis.call('HGET', job, 'status')) or redis.call('SCARD', job .. ':todo') > 0 then
  return 0
end
redis.call('HSET', job, 'result', result)
retire(job, 'completed', now, ttl)
-- In the same atomic step: exactly once, and never without the result.
if url ~= '' then
  local id = string.sub(job, #'poc:job:' + 1)
  redis.call('HSET', 'poc:outbox:' .. id, 'url', url, 'closed', '1')
  push_outbox(id, body, 1, now, callback_ttl)
  redis.call('SADD', 'poc:outbox:jobs', id)
  redis.call('EXPIRE', 'poc:outbox:jobs', callback_ttl)
end
return 1
