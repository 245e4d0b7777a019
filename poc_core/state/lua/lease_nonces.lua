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
local LOOK_S = 1 -- seconds between two looks at all leases: one for all workers, however many ask
local FEW = 8 -- leases that every call looks at
local round, outbox, generating, current = unpack(KEYS)
local worker, wanted, now, until_s, ttl, most_bytes, in_hand = unpack(ARGV)
wanted, now = tonumber(wanted), tonumber(now)
local state, looked_at, next_place, all_places = unpack(redis.call('HMGET', round, 'state', 'looked_at', 'next', 'places'))

local function holder_of(lease)
  return string.match(lease or '', '^(.*)|([^|]*)$')
end

-- Of the leases that the worker was given, those that it has in hand; any other that is still its own goes back.
local kept = {}
for lease in string.gmatch(redis.call('HGET', round .. ':hands', worker) or '', '%S+') do
  if string.find(' ' .. in_hand .. ' ', ' ' .. lease .. ' ', 1, true) then
    kept[#kept + 1] = lease
  elseif holder_of(redis.call('HGET', round .. ':leases', lease)) == worker then
    free_lease(round, lease, ttl)
  end
end

if state ~= 'GENERATING' then
  return {'stopped'}
end
local is_due = math.abs(now - (tonumber(looked_at) or 0)) >= LOOK_S -- clocks of hosts differ
if is_due then
  redis.call('HSET', round, 'looked_at', now)
  spread_counts(round, ttl)
  -- A round that goes on keeps all that it is made of, however long it lasts.
  for _, suffix in ipairs({'', ':leases', ':hands', ':free', ':workers', ':excluded', ':valid'}) do
    redis.call('EXPIRE', round .. suffix, ttl)
  end
  for _, key in ipairs({outbox, outbox .. ':entries', generating, current}) do
    redis.call('EXPIRE', key, ttl)
  end
end
if tonumber(redis.call('HGET', outbox, 'bytes') or '0') >= tonumber(most_bytes) then
  return {'full'}
end

local function free_those_of_the_dead()
  local leases = redis.call('HGETALL', round .. ':leases')
  for i = 1, #leases, 2 do
    local holder, expires = holder_of(leases[i + 1])
    if holder ~= worker and (tonumber(expires) < now or redis.call('EXISTS', 'poc:worker:' .. holder) == 0) then
      free_lease(round, leases[i], ttl)
    end
  end
end

local n_leases = redis.call('HLEN', round .. ':leases')
local has_looked = n_leases <= FEW or is_due
if has_looked then
  free_those_of_the_dead()
end
local lowest = redis.call('ZRANGE', round .. ':free', 0, 0)[1]
if not lowest and tonumber(next_place) >= tonumber(all_places) and not has_looked then
  free_those_of_the_dead()
  lowest = redis.call('ZRANGE', round .. ':free', 0, 0)[1]
end
local first, places
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
  first = tonumber(next_place)
  places = math.min(wanted, tonumber(all_places) - first)
  if places <= 0 then
    end_if_exhausted(round, generating, now, ttl)
    return {'exhausted'}
  end
  redis.call('HSET', round, 'next', string.format('%d', first + places))
end
local lease = member(first, places)
kept[#kept + 1] = lease
redis.call('HSET', round .. ':leases', lease, worker .. '|' .. until_s)
redis.call('HSET', round .. ':hands', worker, table.concat(kept, ' '))
if n_leases == 0 then
  make_table(round .. ':leases')
  make_table(round .. ':hands')
end
if has_looked then -- else they were there before, and whoever looks next keeps them
  redis.call('EXPIRE', round .. ':leases', ttl)
  redis.call('EXPIRE', round .. ':hands', ttl)
end
return {'ok', string.format('%d', first), string.format('%d', places)}
