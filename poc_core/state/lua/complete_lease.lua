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
if redis.call('HDEL', round .. ':leases', lease) == 0 and redis.call('ZREM', round .. ':free', lease) == 0 then
  return 0
end
local second = string.format('%d', math.floor(tonumber(now)))
redis.call('HINCRBY', round, 'n_processed', places)
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
local has_receiver, is_closed = unpack(redis.call('HMGET', outbox, 'url', 'closed'))
-- The last values of a round that is over come after it was closed; its receiver waits for them.
local due = is_closed and now or tonumber(now) + tonumber(interval)
for i = first_entry, #ARGV, 2 do
  local n_values, entry = ARGV[i], ARGV[i + 1]
  redis.call('HINCRBY', round, 'n_valid', n_values)
  if has_receiver then
    push_outbox(round_id, entry, n_values, due, ttl)
  end
end
for i = first_listed, first_entry - 1, CHUNK do
  redis.call('RPUSH', round .. ':valid', unpack(ARGV, i, math.min(i + CHUNK, first_entry) - 1))
end
if first_entry > first_listed then
  redis.call('LTRIM', round .. ':valid', -tonumber(most_kept), -1)
  redis.call('EXPIRE', round .. ':valid', ttl)
end
if end_if_exhausted(round, generating, now, ttl) ~= 'GENERATING' then
  spread_counts(round, ttl) -- nobody leases any more
end
return 1
