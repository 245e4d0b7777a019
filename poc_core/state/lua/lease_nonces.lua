-- Leases places of a round's nonce sequence to a worker: what a dead worker left behind first, then the next ones.
-- KEYS: 1 round, 2 its outbox, 3 the generating key of its model, 4 poc:round:current.
-- ARGV: 1 worker id, 2 places wanted, 3 now, 4 when the lease expires, 5 ttl, 6 most artifacts that may wait in the outbox,
-- 7 the leases (first:places, blanks between) that the worker has in hand: any other of its own it has lost, like a dead
-- worker's.
-- Returns {reason} with stopped, full or exhausted, or {'ok', first place, places}.
local round, wanted, now = KEYS[1], tonumber(ARGV[2]), tonumber(ARGV[3])
if redis.call('HGET', round, 'state') ~= 'GENERATING' then
  return {'stopped'}
end
-- A round that goes on keeps all that it is made of, however long it lasts.
for _, suffix in ipairs({'', ':leases', ':free', ':workers', ':excluded', ':valid'}) do
  redis.call('EXPIRE', round .. suffix, ARGV[5])
end
for _, key in ipairs({KEYS[2], KEYS[2] .. ':entries', KEYS[3], KEYS[4]}) do
  redis.call('EXPIRE', key, ARGV[5])
end
if tonumber(redis.call('HGET', KEYS[2], 'waiting') or '0') >= tonumber(ARGV[6]) then
  return {'full'}
end
local leases = redis.call('HGETALL', round .. ':leases')
for i = 1, #leases, 2 do
  local holder, expires = string.match(leases[i + 1], '^(.*)|([^|]*)$')
  local lost
  if holder == ARGV[1] then
    lost = not string.find(' ' .. ARGV[7] .. ' ', ' ' .. leases[i] .. ' ', 1, true)
  else
    lost = tonumber(expires) < now or redis.call('EXISTS', 'poc:worker:' .. holder) == 0
  end
  if lost then
    free_lease(round, leases[i], ARGV[5])
  end
end
local first, places
local lowest = redis.call('ZRANGE', round .. ':free', 0, 0)[1]
if lowest then
  redis.call('ZREM', round .. ':free', lowest)
  first, places = string.match(lowest, '^(%d+):(%d+)$')
  first, places = tonumber(first), tonumber(places)
  if places > wanted then -- its first holder ran larger batches
    redis.call('ZADD', round .. ':free', first + wanted, member(first + wanted, places - wanted))
    redis.call('EXPIRE', round .. ':free', ARGV[5])
    places = wanted
  end
else
  local fields = redis.call('HMGET', round, 'next', 'places')
  first = tonumber(fields[1])
  places = math.min(wanted, tonumber(fields[2]) - first)
  if places <= 0 then
    return {'exhausted'}
  end
  redis.call('HSET', round, 'next', string.format('%d', first + places))
end
redis.call('HSET', round .. ':leases', member(first, places), ARGV[1] .. '|' .. ARGV[4])
redis.call('EXPIRE', round .. ':leases', ARGV[5])
return {'ok', string.format('%d', first), string.format('%d', places)}
