-- Extends the lock of an outbox.
--
-- KEYS: 1 outbox          its hash
-- ARGV: 1 token           of the delivery that has the lock
--       2 locked_until    seconds since the epoch: new end of the lock
--       3 ttl             seconds for which undelivered data is kept
-- Returns 1. Returns 0, and changes nothing, if another process has the lock.
local outbox = KEYS[1]
local token, locked_until, ttl = unpack(ARGV)
if redis.call('HGET', outbox, 'token') ~= token then
  return 0
end
write_even_if_full(outbox)
redis.call('HSET', outbox, 'locked_until', locked_until)
due_outbox(string.sub(outbox, #'poc:outbox:' + 1), locked_until, ttl)
return 1
