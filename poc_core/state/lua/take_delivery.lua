-- Locks an outbox for one delivery. What was once taken stays one payload, with one number, until it is delivered.
-- KEYS: 1 outbox. ARGV: 1 token, 2 now, 3 locked until, 4 most artifacts of a payload, 5 ttl.
-- Returns {} when there is nothing to do now, {'expired'} when what waited is gone, else {url, head, payload number, entries, failures}.
local outbox, entries = KEYS[1], KEYS[1] .. ':entries'
local f = redis.call('HMGET', outbox, 'url', 'head', 'number', 'in_flight', 'failures', 'locked_until', 'next_at')
local id = string.sub(outbox, #'poc:outbox:' + 1)
if not f[1] then -- its retention ended; what is delivered to the end is due no more
  redis.call('SREM', 'poc:outbox:jobs', id)
  return redis.call('ZREM', 'poc:outbox:due', id) == 1 and {'expired'} or {}
end
local free_at = math.max(tonumber(f[6] or '0'), tonumber(f[7] or '0'))
if free_at > tonumber(ARGV[2]) then
  redis.call('ZADD', 'poc:outbox:due', 'XX', string.format('%.3f', free_at), id)
  return {}
end
local taken = tonumber(f[4] or '0')
if taken == 0 then
  local most, total, length = tonumber(ARGV[4]), 0, redis.call('LLEN', entries)
  while taken < length do
    for _, entry in ipairs(redis.call('LRANGE', entries, taken, taken + CHUNK - 1)) do
      total = total + tonumber(string.match(entry, '^(%d+)|'))
      if taken > 0 and total > most then
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
redis.call('HSET', outbox, 'in_flight', taken, 'token', ARGV[1], 'locked_until', ARGV[3])
if redis.call('HEXISTS', outbox, 'closed') == 0 then -- else its retention counts from its end, whatever is tried
  redis.call('EXPIRE', outbox, ARGV[5])
  redis.call('EXPIRE', entries, ARGV[5])
end
-- Looked at again when the lock is over, should the one who holds it die.
due_outbox(id, ARGV[3], ARGV[5])
return {f[1], f[2] or '', f[3] or '0', string.format('%d', taken), f[5] or '0'}
