-- Ends a delivery: removes what the receiver took or what is given up, or notes when to try again.
-- KEYS: 1 outbox. ARGV: 1 token, 2 delivered, failed or dropped, 3 when the next delivery is due, 4 error or '', 5 now, 6 ttl, 7 most artifacts of a
-- payload.
-- Returns 1, or 0 when the lock was lost to another process (nothing changes then).
local outbox, entries = KEYS[1], KEYS[1] .. ':entries'
local id = string.sub(outbox, #'poc:outbox:' + 1)
if redis.call('HGET', outbox, 'token') ~= ARGV[1] then
  return 0
end
redis.call('HDEL', outbox, 'token', 'locked_until')
if ARGV[4] ~= '' then
  redis.call('HSET', outbox, 'last_error', ARGV[4])
end
if ARGV[2] == 'failed' then
  redis.call('HINCRBY', outbox, 'failures', 1)
  redis.call('HSET', outbox, 'next_at', ARGV[3])
  due_outbox(id, ARGV[3], ARGV[6])
  return 1
end
local taken, ended = tonumber(redis.call('HGET', outbox, 'in_flight')), 0
for first = 0, taken - 1, CHUNK do
  for _, entry in ipairs(redis.call('LRANGE', entries, first, math.min(first + CHUNK, taken) - 1)) do
    ended = ended + tonumber(string.match(entry, '^(%d+)|'))
  end
end
redis.call('LTRIM', entries, taken, -1)
local waiting = redis.call('HINCRBY', outbox, 'waiting', -ended)
redis.call('HINCRBY', outbox, ARGV[2], ended)
redis.call('HINCRBY', outbox, 'number', 1)
redis.call('HDEL', outbox, 'in_flight', 'failures')
if ARGV[2] == 'delivered' then
  redis.call('HDEL', outbox, 'last_error')
  redis.call('HSET', outbox, 'delivered_at', ARGV[5])
end
-- A full payload need not wait, nor what is left of a round that is over: no fuller one would come.
local at_once = waiting >= tonumber(ARGV[7]) or redis.call('HEXISTS', outbox, 'closed') == 1
local due = at_once and ARGV[5] or ARGV[3]
redis.call('HSET', outbox, 'next_at', due)
if redis.call('LLEN', entries) == 0 then
  redis.call('ZREM', 'poc:outbox:due', id)
  redis.call('SREM', 'poc:outbox:jobs', id)
else
  due_outbox(id, due, ARGV[6])
end
return 1
