-- Leases further batches of a job to a worker that has room beside one it has claimed: neighbours, as they stand. Batches
-- that somebody holds, or that a worker or engine was lost on, are left to their own messages: a batch that kills its
-- workers is not to take others with it.
local job = KEYS[1] -- poc:job:{id}
local lease = ARGV[1] -- worker id, second and token, as claim_batch takes it
local ttl = ARGV[2] -- seconds that the job lives on
local spec = ARGV[3] -- the spec of the batch beside which these are computed; a job of another spec gives nothing
local first = tonumber(ARGV[4]) -- the batch to begin with
local room = tonumber(ARGV[5]) -- nonces, all batches together
local most_misses = tonumber(ARGV[6]) -- batches in a row that are not to be had, after which the search ends
-- Returns {batch, its nonces, batch, its nonces, ...}.
local fields = redis.call('HMGET', job, 'status', 'model', 'spec', 'n_batches')
if not is_active(fields[1]) or fields[3] ~= spec or redis.call('EXISTS', 'poc:round:generating:' .. fields[2]) == 1 then
  return {}
end
local found, misses = {}, 0
for index = first, tonumber(fields[4]) - 1 do
  local batch = string.format('%d', index)
  local holder = redis.call('HGET', job .. ':leases', batch)
  local free = redis.call('SISMEMBER', job .. ':todo', batch) == 1
    and (not holder or holder == lease) -- the same: this call is repeated, its first answer was lost
    and redis.call('HEXISTS', job .. ':attempts', batch) == 0
  if free then
    local nonces = redis.call('HGET', job .. ':nonces', batch)
    room = room - select(2, string.gsub(nonces, ',', '')) - 1
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
  if fields[1] == 'queued' then
    redis.call('HSET', job, 'status', 'running', 'started_at', string.match(lease, '|(%d+)|%w+$'))
  end
  touch(job, ttl)
end
return found
