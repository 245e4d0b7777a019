-- Leases further batches to a worker that has room beside one it has claimed: its job's next, then those of other jobs of
-- the same spec and kind, as they stand: a validation is not held up with plain jobs, nor takes them along. Batches that
-- somebody holds, or that a worker or engine was lost on, are left to their own messages: a batch that kills its workers is
-- not to take others with it.
--
-- KEYS: 1 job            its hash; its working keys are this plus a suffix
-- ARGV: 1 lease          of the batch beside which these are computed
--       2 ttl            seconds a job is kept without progress
--       3 spec           of that batch; a job of another spec gives nothing
--       4 first          index of the batch of its job to begin with
--       5 room           nonces, all batches together
--       6 most_misses    batches in a row that are not to be had, after which a job is left
--       7 most_jobs      that are looked at beside its own
-- Returns {id of the job, batch, its nonces, ...}.
local LOOKED_AT = 64 -- batches that are looked at together
local job = KEYS[1]
local lease, ttl, spec, first, room, most_misses, most_jobs = unpack(ARGV)
room, most_misses, most_jobs = tonumber(room), tonumber(most_misses), math.min(tonumber(most_jobs), CHUNK)
local found = {}
local kind = redis.call('HGET', job, 'kind')

-- Leases batches of a job from index `from` on, as many as there is room for.
local function take_from(id, from)
  local other = 'poc:job:' .. id
  local status, own_spec, n_batches, own_kind = unpack(redis.call('HMGET', other, 'status', 'spec', 'n_batches', 'kind'))
  if not is_active(status) or own_spec ~= spec or own_kind ~= kind then
    return
  end
  -- However many it is said to have.
  n_batches = math.min(tonumber(n_batches), redis.call('HLEN', other .. ':nonces'))
  local n_before, misses = #found, 0
  local function take(index, holder, losses)
    local batch = string.format('%d', index)
    local is_free = (not holder or holder == lease) -- the same: this call is repeated, its first answer was lost
      and not losses and redis.call('SISMEMBER', other .. ':todo', batch) == 1
    misses = is_free and 0 or misses + 1
    if not is_free then
      return misses < most_misses
    end
    local nonces = redis.call('HGET', other .. ':nonces', batch)
    local n = count_nonces(nonces)
    if n > room then
      return false
    end
    room = room - n
    redis.call('HSET', other .. ':leases', batch, lease)
    for _, value in ipairs({id, batch, nonces}) do
      found[#found + 1] = value
    end
    return true
  end
  local goes_on, index = true, from
  while goes_on and index < n_batches do
    local indexes = {}
    for one = index, math.min(index + LOOKED_AT, n_batches) - 1 do
      indexes[#indexes + 1] = string.format('%d', one)
    end
    local holders = redis.call('HMGET', other .. ':leases', unpack(indexes))
    local losses = redis.call('HMGET', other .. ':attempts', unpack(indexes))
    for i = 1, #indexes do
      goes_on = goes_on and take(index + i - 1, holders[i], losses[i])
    end
    index = index + #indexes
  end
  if #found > n_before then
    if status == 'queued' then
      local _, since = lease_parts(lease)
      redis.call('HSET', other, 'status', 'running', 'started_at', since)
    end
    touch(other, ttl)
  end
end

local id = string.sub(job, #'poc:job:' + 1)
local model, created_at = unpack(redis.call('HMGET', job, 'model', 'created_at'))
if room <= 0 or not model or redis.call('EXISTS', 'poc:round:generating:' .. model) == 1 then
  return {}
end
take_from(id, math.max(0, tonumber(first)))
-- Messages come in the order of jobs: where many workers are, those before have their batches in hand, those behind wait.
local active, seen, n_seen = 'poc:jobs:active:' .. model, {[id] = true}, 0
local function look_at(others)
  for _, other in ipairs(others) do
    if room > 0 and n_seen < most_jobs and not seen[other] then
      seen[other], n_seen = true, n_seen + 1
      take_from(other, 0)
    end
  end
end
if room > 0 and created_at then
  look_at(redis.call('ZRANGEBYSCORE', active, created_at, '+inf', 'LIMIT', 0, string.format('%d', most_jobs + 1)))
end
if room > 0 and n_seen < most_jobs then
  look_at(redis.call('ZRANGE', active, 0, string.format('%d', most_jobs)))
end
return found
