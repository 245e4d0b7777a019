-- Stores the values of a lease's nonces. Ignores the values if another worker has already completed the lease.
--
-- KEYS: 1 work               the hash of a job or a round; its working keys are this plus a suffix
--       2 outbox             only for a round: its outbox
--       3 generating         only for a round: the key of the id of the round that the model's workers compute
-- ARGV: 1 lease              for a job: the batch's index; for a round: the lease's name (member)
--       2 n_values           number of values
--       3 worker             id of the worker that computed the values
--       4 now                seconds since the epoch
--       5 ttl                seconds for which the job or round is kept
--   for a job:
--       6 values             in the order of the batch's nonces, as JSON texts, one per line
--   for a round:
--       6 excluded           nonces without a finite state, as a JSON list, or ''
--       7 n_excluded
--       8 interval           seconds from now to the next callback
--       9 most_kept          most reported nonces stored for /status
--      10 n_listed           number of nonces of this lease that /status lists
--      11... an entry for each listed nonce; then, for each outbox entry, its number of values and the entry
-- Returns for a job: 1 if all its batches are done, so that its answer must be built; else 0. Returns for a round: 1 if
-- the values were stored, else 0.
local work, outbox, generating = unpack(KEYS)
local lease, n_values, worker, now, ttl, values = unpack(ARGV, 1, 6)
local excluded, n_excluded, interval, most_kept, n_listed = unpack(ARGV, 6, 10)
local second = string.format('%d', math.floor(tonumber(now)))

local function complete_batch(job)
  if not is_active(redis.call('HGET', job, 'status')) then
    return 0
  end
  local nonces = redis.call('HGET', job .. ':nonces', lease)
  if not nonces then
    return redis.error_reply('ERR the job has no batch ' .. lease)
  end
  if count_nonces(nonces) ~= tonumber(n_values) then
    return redis.error_reply('ERR batch ' .. lease .. ' has another number of nonces than the values given')
  end
  if redis.call('SREM', job .. ':todo', lease) == 1 then
    redis.call('HSET', job .. ':values', lease, values)
    redis.call('HDEL', job, 'waiting_for')
    redis.call('HINCRBY', job, 'by:' .. name_of_worker(worker), n_values)
    redis.call('HDEL', job .. ':leases', lease)
    redis.call('HDEL', job .. ':attempts', lease)
    redis.call('HINCRBY', job, 'n_done', n_values)
    redis.call('DECRBY', 'poc:queued_nonces', n_values)
    count_processed(n_values, second, worker, ttl)
    touch(job, ttl)
  end
  return redis.call('SCARD', job .. ':todo') == 0 and 1 or 0
end

local function added(count, n)
  return string.format('%d', (tonumber(count) or 0) + n)
end

local function complete_places(round)
  local first_listed = 11
  local first_entry = first_listed + tonumber(n_listed)
  local round_id = string.sub(round, #'poc:round:' + 1)
  if redis.call('HDEL', round .. ':leases', lease) == 0 and redis.call('ZREM', round .. ':free', lease) == 0 then
    return 0
  end
  redis.call('HINCRBY', round .. ':counted', second .. '|' .. worker, n_values)
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
  local has_receiver, is_closed, bytes, waiting, next_at =
    unpack(redis.call('HMGET', outbox, 'url', 'closed', 'bytes', 'waiting', 'next_at'))
  -- If the round was closed, its receiver waits for these last values, so they are due at once. The API and the courier
  -- set next_at with their own clocks: a delivery is not late because this worker's clock is ahead.
  local due = is_closed and 0 or next_at or tonumber(now) + tonumber(interval)
  local n_new, n_bytes = 0, 0
  for i = first_entry, #ARGV, 2 do
    local n, entry = ARGV[i], ARGV[i + 1]
    n_new = n_new + tonumber(n)
    if has_receiver then
      n_bytes = n_bytes + push_entry(round_id, entry, n, due, ttl)
    end
  end
  redis.call('HSET', round, 'n_processed', added(n_processed, n_values), 'n_valid', added(n_valid, n_new))
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
    spread_counts(round, ttl) -- lease.lua no longer does so for this round
  elseif tonumber(next_place) >= tonumber(all_places) then
    end_if_exhausted(round, generating, now, ttl)
  end
  return 1
end

return outbox and complete_places(work) or complete_batch(work)
