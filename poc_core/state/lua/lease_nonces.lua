-- Leases places of a round's nonce sequence to a worker: what a dead worker left behind first, then the next ones.
--
-- KEYS: 1 round           its hash; its working keys are this plus a suffix
--       2 outbox          the round's
--       3 generating      the key that says for which round the model's workers compute
--       4 current         poc:round:current
-- ARGV: 1 worker          who asks
--       2 wanted          places
--       3 now             seconds since the epoch
--       4 until_s         when the lease expires, seconds since the epoch
--       5 ttl             seconds the round is kept
--       6 most_bytes      that artifacts may take that wait in the outbox
--       7 in_hand         the leases (first:places, blanks between) that the worker computes: any other of its own it
--                         has lost, like a dead worker's
-- Returns {reason} with stopped, full or exhausted, or {'ok', first place, places}.
local round, outbox, generating, current = unpack(KEYS)
local worker, wanted, now, until_s, ttl, most_bytes, in_hand = unpack(ARGV)
wanted, now = tonumber(wanted), tonumber(now)
if redis.call('HGET', round, 'state') ~= 'GENERATING' then
  return {'stopped'}
end
-- A round that goes on keeps all that it is made of, however long it lasts.
for _, suffix in ipairs({'', ':leases', ':free', ':workers', ':excluded', ':valid'}) do
  redis.call('EXPIRE', round .. suffix, ttl)
end
for _, key in ipairs({outbox, outbox .. ':entries', generating, current}) do
  redis.call('EXPIRE', key, ttl)
end
if tonumber(redis.call('HGET', outbox, 'bytes') or '0') >= tonumber(most_bytes) then
  return {'full'}
end
local leases = redis.call('HGETALL', round .. ':leases')
for i = 1, #leases, 2 do
  local holder, expires = string.match(leases[i + 1], '^(.*)|([^|]*)$')
  local lost
  if holder == worker then
    lost = not string.find(' ' .. in_hand .. ' ', ' ' .. leases[i] .. ' ', 1, true)
  else
    lost = tonumber(expires) < now or redis.call('EXISTS', 'poc:worker:' .. holder) == 0
  end
  if lost then
    free_lease(round, leases[i], ttl)
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
    redis.call('EXPIRE', round .. ':free', ttl)
    places = wanted
  end
else
  local next_place, all_places = unpack(redis.call('HMGET', round, 'next', 'places'))
  first = tonumber(next_place)
  places = math.min(wanted, tonumber(all_places) - first)
  if places <= 0 then
    end_if_exhausted(round, generating, now, ttl)
    return {'exhausted'}
  end
  redis.call('HSET', round, 'next', string.format('%d', first + places))
end
redis.call('HSET', round .. ':leases', member(first, places), worker .. '|' .. until_s)
redis.call('EXPIRE', round .. ':leases', ttl)
return {'ok', string.format('%d', first), string.format('%d', places)}
