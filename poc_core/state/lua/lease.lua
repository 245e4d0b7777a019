-- Leases the next work of a model to a worker: nonces of the generating round, or, if no round generates, batches of
-- the jobs in the model's line (see join_line). From the line, leases either one batch of any spec, or several batches
-- of one spec, which the worker computes together with a batch that it leased before. A batch during which a worker or
-- an engine was lost is computed alone: if the batch kills another worker, no other batch is affected.
--
-- KEYS: 1 line          zset of the jobs with batches to lease (join_line)
--       2 generating    the key of the id of the round that the model's workers compute
-- ARGV: 1 lease         value of the new leases, which lease_parts parses
--       2 now           seconds since the epoch
--       3 from          lowest score in the line; validations' scores are below 0
--       4 to            highest score in the line
--       5 spec          of all batches; '' for one batch of any spec
--       6 room          if a spec is set: most nonces of all batches together; else 1
--       7 most_jobs     most jobs that have batches left but are skipped
--       8 ttl           seconds for which a job is kept without progress
--       9 known_round   id of the round for which the worker computes, or ''
--      10 places        most nonces of that round to lease; 0 for none
--      11 most_bytes    most bytes that may wait in the round's outbox
--      12 round_ttl     seconds for which the round is kept
-- Returns {'round'} if another round than known_round generates. Returns for known_round {'full'}, {'exhausted'} or
-- {'leased', index of the first nonce in the sequence, number of nonces}. Returns for batches {spec, kind, '1' if the
-- batch must be computed alone, then job id, batch, nonces of each batch}. Returns {} if there is no work.
local LOOK_S = 1 -- seconds between two checks of all leases of a round, however many workers ask
local line, generating = unpack(KEYS)
local lease, now, from, to, spec, room, most_jobs, ttl, known_round, places, most_bytes, round_ttl = unpack(ARGV)
now, room, most_jobs, places = tonumber(now), tonumber(room), tonumber(most_jobs), tonumber(places)
local is_any = spec == ''
local found = {}

local function lease_places(id)
  local round, outbox = 'poc:round:' .. id, 'poc:outbox:' .. id
  local state, looked_at, next_place, all_places = unpack(redis.call('HMGET', round, 'state', 'looked_at', 'next', 'places'))
  if state ~= 'GENERATING' then
    return {}
  end
  -- Hosts' clocks differ, hence math.abs. Once all nonces are leased, only leases of dead workers can be leased again.
  local is_due = math.abs(now - (tonumber(looked_at) or 0)) >= LOOK_S or tonumber(next_place) >= tonumber(all_places)
  if is_due then
    redis.call('HSET', round, 'looked_at', now)
    spread_counts(round, round_ttl)
    free_lost(round)
    keep_round(id, generating, round_ttl) -- however long it lasts
  end
  if places == 0 or tonumber(redis.call('HGET', outbox, 'bytes') or '0') >= tonumber(most_bytes) then
    return {'full'}
  end
  local first, n
  local lowest = redis.call('ZRANGE', round .. ':free', 0, 0)[1]
  if lowest then -- a returned lease, or the lease of a dead worker
    redis.call('ZREM', round .. ':free', lowest)
    first, n = string.match(lowest, '^(%d+):(%d+)$')
    first, n = tonumber(first), tonumber(n)
    if n > places then -- its first worker had larger batches
      free_lease(round, member(first + places, n - places))
      n = places
    end
  else
    first = tonumber(next_place)
    n = math.min(places, tonumber(all_places) - first)
    if n <= 0 then
      end_if_exhausted(round, generating, now, round_ttl)
      return {'exhausted'}
    end
    redis.call('HSET', round, 'next', string.format('%d', first + n))
  end
  redis.call('HSET', round .. ':leases', member(first, n), lease)
  if redis.call('HLEN', round .. ':leases') == 1 then
    make_table(round .. ':leases')
    redis.call('EXPIRE', round .. ':leases', round_ttl)
  end
  return {'leased', string.format('%d', first), string.format('%d', n)}
end

-- Leases batches of a job while there is room: first returned batches, then batches from the job's field `next` on. All
-- batches below `next` were leased before. Returns true if the job has more batches to lease.
local function lease_batches(id)
  local job = 'poc:job:' .. id
  local status, own_spec, kind, n_batches, cursor = unpack(redis.call('HMGET', job, 'status', 'spec', 'kind', 'n_batches', 'next'))
  if not is_active(status) then
    return false
  end
  if not is_any and own_spec ~= spec then
    return true
  end
  n_batches = math.min(tonumber(n_batches), redis.call('HLEN', job .. ':nonces')) -- n_batches may be foreign content
  cursor = tonumber(cursor or 0)
  local n_before, has_more = #found, true
  while room > 0 do
    local returned = redis.call('ZRANGE', job .. ':free', 0, 0)[1]
    if not returned and cursor >= n_batches then
      has_more = false
      break
    end
    local batch = returned or string.format('%d', cursor)
    if redis.call('SISMEMBER', job .. ':todo', batch) == 1 and redis.call('HEXISTS', job .. ':leases', batch) == 0 then
      local is_suspect = redis.call('HEXISTS', job .. ':attempts', batch) == 1
      local nonces = redis.call('HGET', job .. ':nonces', batch)
      local n = count_nonces(nonces)
      if not is_any and (is_suspect or n > room) then
        break
      end
      redis.call('HSET', job .. ':leases', batch, lease)
      if #found == 0 then
        found = {own_spec, kind, is_suspect and '1' or '0'}
      end
      for _, value in ipairs({id, batch, nonces}) do
        found[#found + 1] = value
      end
      room = is_any and 0 or room - n
    end
    if returned then
      redis.call('ZREM', job .. ':free', batch)
    else
      cursor = cursor + 1
    end
  end
  redis.call('HSET', job, 'next', string.format('%d', cursor))
  if #found > n_before then
    redis.call('HDEL', job, 'waiting_for')
    if status == 'queued' then
      redis.call('HSET', job, 'status', 'running', 'started_at', now)
    end
    touch(job, ttl)
  end
  return has_more
end

local round_id = redis.call('GET', generating)
if round_id then
  return round_id == known_round and lease_places(round_id) or {'round'}
end
local n_passed = 0
while room > 0 and n_passed < most_jobs do
  local id = redis.call('ZRANGEBYSCORE', line, from, to, 'LIMIT', n_passed, 1)[1]
  if not id then
    break
  end
  local is_read, has_more = pcall(lease_batches, id)
  if is_read and has_more then
    n_passed = n_passed + 1
  elseif is_read or not is_full(has_more) then
    redis.call('ZREM', line, id) -- also a job with an unreadable record, which survey_jobs.lua reports
  else
    return redis.error_reply("OOM command not allowed when used memory > 'maxmemory'")
  end
end
return found
