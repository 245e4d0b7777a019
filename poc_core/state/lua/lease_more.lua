-- Leases further batches of a job to a worker that has room beside one it has claimed: neighbours, as they stand. Batches
-- that somebody holds, or that a worker or engine was lost on, are left to their own messages: a batch that kills its
-- workers is not to take others with it.
--
-- KEYS: 1 job            its hash; its working keys are this plus a suffix
-- ARGV: 1 lease          of the batch beside which these are computed
--       2 ttl            seconds the job is kept without progress
--       3 spec           of that batch; a job of another spec gives nothing
--       4 first          index of the batch to begin with
--       5 room           nonces, all batches together
--       6 most_misses    batches in a row that are not to be had, after which the search ends
-- Returns {batch, its nonces, batch, its nonces, ...}.
local job = KEYS[1]
local lease, ttl, spec, first, room, most_misses = unpack(ARGV)
room, most_misses = tonumber(room), tonumber(most_misses)
local status, model, own_spec, n_batches = unpack(redis.call('HMGET', job, 'status', 'model', 'spec', 'n_batches'))
if not is_active(status) or own_spec ~= spec or redis.call('EXISTS', 'poc:round:generating:' .. model) == 1 then
  return {}
end
local found, misses = {}, 0
-- However many it is said to have.
n_batches = math.min(tonumber(n_batches), redis.call('HLEN', job .. ':nonces'))
for index = math.max(0, tonumber(first)), n_batches - 1 do
  local batch = string.format('%d', index)
  local holder = redis.call('HGET', job .. ':leases', batch)
  local is_free = redis.call('SISMEMBER', job .. ':todo', batch) == 1
    and (not holder or holder == lease) -- the same: this call is repeated, its first answer was lost
    and redis.call('HEXISTS', job .. ':attempts', batch) == 0
  if is_free then
    local nonces = redis.call('HGET', job .. ':nonces', batch)
    room = room - count_nonces(nonces)
    if room < 0 then
      break
    end
    misses = 0
    redis.call('HSET', job .. ':leases', batch, lease)
    found[#found + 1] = batch
    found[#found + 1] = nonces
  else
    misses = misses + 1
    if misses == most_misses then
      break
    end
  end
end
if #found > 0 then
  if status == 'queued' then
    local _, since = lease_parts(lease)
    redis.call('HSET', job, 'status', 'running', 'started_at', since)
  end
  touch(job, ttl)
end
return found
