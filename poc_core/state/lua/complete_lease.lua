-- Takes the values of a lease into the outbox, once: a lease that another worker completed meanwhile is ignored.
--
-- KEYS: 1 round              its hash; its working keys are this plus a suffix
--       2 outbox             the round's
--       3 generating         the key that says for which round the model's workers compute
-- ARGV: 1 round_id
--       2 first              place of the lease in the round's nonce sequence
--       3 places             of the lease
--       4 worker
--       5 excluded           nonces without a finite state, as a JSON list, or ''
--       6 n_excluded
--       7 now                seconds since the epoch
--       8 interval           seconds from now to the next callback
--       9 ttl                seconds the round is kept
--      10 most_kept          reported nonces kept for /status
--      11 n_listed           nonces of this lease that /status lists
--      12... these, each as an entry of its own; then for each outbox entry the number of values in it, and the entry
-- Returns 1 when taken, else 0.
local round, outbox, generating = unpack(KEYS)
local round_id, first, places, worker = unpack(ARGV, 1, 4)
local excluded, n_excluded, now, interval, ttl, most_kept, n_listed = unpack(ARGV, 5, 11)
local first_listed = 12
local first_entry = first_listed + tonumber(n_listed)
local lease = member(tonumber(first), tonumber(places))

local function added(count, n)
  return string.format('%d', (tonumber(count) or 0) + n)
end

if redis.call('HDEL', round .. ':leases', lease) == 0 and redis.call('ZREM', round .. ':free', lease) == 0 then
  return 0
end
local second = string.format('%d', math.floor(tonumber(now)))
redis.call('HINCRBY', round .. ':counted', second .. '|' .. worker, places)
if excluded ~= '' then
  redis.call('HINCRBY', round, 'n_excluded', n_excluded)
  local nonces = {}
  for nonce in string.gmatch(excluded, '%d+') do
    nonces[#nonces + 1] = nonce
  end
  for i = 1, #nonces, CHUNK do
    redis.call('RPUSH', round .. ':excluded', unpack(nonces, i, math.min(i + CHUNK - 1, #nonces)))
  end
  redis.call('LTRIM', round .. ':excluded', -1000, -1)
  redis.call('EXPIRE', round .. ':excluded', ttl)
end
local state, next_place, all_places, n_processed, n_valid =
  unpack(redis.call('HMGET', round, 'state', 'next', 'places', 'n_processed', 'n_valid'))
local has_receiver, is_closed, bytes, waiting = unpack(redis.call('HMGET', outbox, 'url', 'closed', 'bytes', 'waiting'))
-- The last values of a round that is over come after it was closed; its receiver waits for them.
local due = is_closed and now or tonumber(now) + tonumber(interval)
local n_new, n_bytes = 0, 0
for i = first_entry, #ARGV, 2 do
  local n_values, entry = ARGV[i], ARGV[i + 1]
  n_new = n_new + tonumber(n_values)
  if has_receiver then
    n_bytes = n_bytes + push_entry(round_id, entry, n_values, due, ttl)
  end
end
redis.call('HSET', round, 'n_processed', added(n_processed, places), 'n_valid', added(n_valid, n_new))
if n_bytes > 0 then
  redis.call('HSET', outbox, 'bytes', added(bytes, n_bytes), 'waiting', added(waiting, n_new))
end
for i = first_listed, first_entry - 1, CHUNK do
  redis.call('RPUSH', round .. ':valid', unpack(ARGV, i, math.min(i + CHUNK, first_entry) - 1))
end
if first_entry > first_listed then
  redis.call('LTRIM', round .. ':valid', -tonumber(most_kept), -1)
  redis.call('EXPIRE', round .. ':valid', ttl)
end
if state ~= 'GENERATING' then
  spread_counts(round, ttl) -- nobody leases any more
elseif tonumber(next_place) >= tonumber(all_places) then
  end_if_exhausted(round, generating, now, ttl)
end
return 1
