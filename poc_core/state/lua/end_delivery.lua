-- Ends a delivery. Removes the payload if it was delivered or dropped, or sets the time of the next try if it failed.
-- After 'gone', removes everything that waits in the outbox, and the outbox's url, so that nothing is sent any more.
--
-- KEYS: 1 outbox        its hash; its entries are this plus :entries
-- ARGV: 1 token         of the delivery that ends
--       2 outcome       delivered, failed, dropped or gone
--       3 next_at       when the next delivery is due, seconds since the epoch
--       4 why           reason of failed or dropped, or ''
--       5 now           seconds since the epoch
--       6 ttl           seconds for which undelivered data is kept
--       7 most          most artifacts per payload
--       8 most_bytes    most bytes per payload
-- Returns 1. Returns 0, and changes nothing, if another process has the lock.
local outbox = KEYS[1]
local token, outcome, next_at, why, now, ttl, most, most_bytes = unpack(ARGV)
local entries = outbox .. ':entries'
local id = string.sub(outbox, #'poc:outbox:' + 1)
if redis.call('HGET', outbox, 'token') ~= token then
  return 0
end
redis.call('HDEL', outbox, 'token', 'locked_until')
if why ~= '' then
  redis.call('HSET', outbox, 'last_error', why)
end
if outcome == 'failed' then
  if redis.call('HINCRBY', outbox, 'failures', 1) == 1 then
    note_event('receiver', 'A payload of ' .. short_id(id) .. ' was not taken: ' .. shortened(why), id, now)
  end
  redis.call('HSETNX', outbox, 'failing_since', now)
  redis.call('HSET', outbox, 'next_at', next_at)
  due_outbox(id, next_at, ttl)
  return 1
end
local taken, ended, fits = unpack(redis.call('HMGET', outbox, 'in_flight', 'in_flight_artifacts', 'fits'))
taken, ended = math.min(tonumber(taken), redis.call('LLEN', entries)), tonumber(ended)
if outcome == 'gone' then
  outcome, taken, ended = 'dropped', redis.call('LLEN', entries), tonumber(redis.call('HGET', outbox, 'waiting'))
  redis.call('HDEL', outbox, 'url')
end
local bytes = 0
for first = 0, taken - 1, CHUNK do
  for _, entry in ipairs(redis.call('LRANGE', entries, first, math.min(first + CHUNK, taken) - 1)) do
    bytes = bytes + #entry
  end
end
redis.call('LTRIM', entries, taken, -1)
local waiting = redis.call('HINCRBY', outbox, 'waiting', string.format('%d', -ended))
local waiting_bytes = redis.call('HINCRBY', outbox, 'bytes', string.format('%d', -bytes))
if redis.call('HEXISTS', outbox, 'head') == 0 then
  count_job_bytes(-bytes, ttl)
end
redis.call('HINCRBY', outbox, outcome, ended)
redis.call('HINCRBY', outbox, 'number', 1)
if redis.call('HDEL', outbox, 'failures') == 1 then
  local what = outcome == 'delivered' and ' was taken after all.' or ' is given up: ' .. shortened(why)
  note_event('receiver', 'A payload of ' .. short_id(id) .. what, id, now)
end
redis.call('HDEL', outbox, 'in_flight', 'in_flight_artifacts', 'failing_since')
if outcome == 'delivered' then
  redis.call('HDEL', outbox, 'last_error')
  redis.call('HSET', outbox, 'delivered_at', now)
end
if fits then
  most = math.min(tonumber(most), tonumber(fits))
  if outcome == 'delivered' and ended >= tonumber(fits) then -- maybe it takes a little more
    redis.call('HINCRBY', outbox, 'fits', math.ceil(tonumber(fits) / 16))
  end
end
-- The next payload is due at once if it is full, or if the round has ended: then no fuller payload would come.
local at_once = waiting >= tonumber(most) or waiting_bytes >= tonumber(most_bytes) or
  redis.call('HEXISTS', outbox, 'closed') == 1
local due = at_once and now or next_at
redis.call('HSET', outbox, 'next_at', due)
if redis.call('LLEN', entries) == 0 then
  redis.call('ZREM', 'poc:outbox:due', id)
  redis.call('HDEL', 'poc:outbox:of_jobs', id)
else
  due_outbox(id, due, ttl)
end
return 1
