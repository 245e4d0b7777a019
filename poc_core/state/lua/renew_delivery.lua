-- Holds an outbox's lock for longer. KEYS: 1 outbox. ARGV: 1 token, 2 locked until, 3 ttl. Returns 0 when the lock was lost.
local outbox = KEYS[1]
if redis.call('HGET', outbox, 'token') ~= ARGV[1] then
  return 0
end
redis.call('HSET', outbox, 'locked_until', ARGV[2])
due_outbox(string.sub(outbox, #'poc:outbox:' + 1), ARGV[2], ARGV[3])
return 1
