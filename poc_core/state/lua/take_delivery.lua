-- Locks an outbox for one delivery. What was once taken stays one payload, with one number, until it is delivered.
--
-- KEYS: 1 outbox          its hash; its entries are this plus :entries
-- ARGV: 1 token           of the delivery that begins
--       2 now             seconds since the epoch
--       3 locked_until    seconds since the epoch
--       4 most            artifacts of a payload
--       5 ttl             seconds that what waits is kept
-- Returns {} when there is nothing to do now, {'expired'} when what waited is gone, else {url, head, payload number,
-- entries, failures}.
local outbox = KEYS[1]
local token, now, locked_until, most, ttl = unpack(ARGV)
local entries = outbox .. ':entries'
local id = string.sub(outbox, #'poc:outbox:' + 1)
local url, head, number, in_flight, failures, held_until, next_at = unpack(redis.call(
  'HMGET', outbox, 'url', 'head', 'number', 'in_flight', 'failures', 'locked_until', 'next_at'))
if not url then -- its retention ended; what is delivered to the end is due no more
  redis.call('SREM', 'poc:outbox:jobs', id)
  return redis.call('ZREM', 'poc:outbox:due', id) == 1 and {'expired'} or {}
end
local free_at = math.max(tonumber(held_until or '0'), tonumber(next_at or '0'))
if free_at > tonumber(now) then
  redis.call('ZADD', 'poc:outbox:due', 'XX', string.format('%.3f', free_at), id)
  return {}
end
local taken = tonumber(in_flight or '0')
if taken == 0 then
  local total, length = 0, redis.call('LLEN', entries)
  while taken < length do
    for _, entry in ipairs(redis.call('LRANGE', entries, taken, taken + CHUNK - 1)) do
      total = total + entry_count(entry)
      if taken > 0 and total > tonumber(most) then
        length = 0 -- ends the outer loop: the payload is full
        break
      end
      taken = taken + 1
    end
  end
end
if taken == 0 then
  redis.call('ZREM', 'poc:outbox:due', id)
  return {}
end
redis.call('HSET', outbox, 'in_flight', taken, 'token', token, 'locked_until', locked_until)
if redis.call('HEXISTS', outbox, 'closed') == 0 then -- else its retention counts from its end, whatever is tried
  redis.call('EXPIRE', outbox, ttl)
  redis.call('EXPIRE', entries, ttl)
end
-- Looked at again when the lock is over, should the one who holds it die.
due_outbox(id, locked_until, ttl)
return {url, head or '', number or '0', string.format('%d', taken), failures or '0'}
