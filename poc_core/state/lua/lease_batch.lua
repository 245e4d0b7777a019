-- Leases a batch to a worker, unless another lease of it holds (lease_state).
--
-- KEYS: 1 job            its hash; its working keys are this plus a suffix
-- ARGV: 1 batch          its index
--       2 lease          as lease_parts reads it
--       3 now            seconds since the epoch
--       4 ttl            seconds the job is kept without progress
--       5 most_losses    of workers or engines, with which the job fails
--       6 failed_ttl     seconds a job that fails is kept
--       7 oldest_s       second since the epoch before which a lease is too old
-- Returns {reason} with gone, ended, round, done or held, or {'ok', model, spec, nonces, kind of the job}.
local job = KEYS[1]
local batch, lease, now, ttl, most_losses, failed_ttl, oldest_s = unpack(ARGV)
local status, model, spec, kind = unpack(redis.call('HMGET', job, 'status', 'model', 'spec', 'kind'))
if not status then
  return {'gone'}
end
if not is_active(status) then
  return {'ended'}
end
if redis.call('EXISTS', 'poc:round:generating:' .. model) == 1 then
  return {'round'}
end
if redis.call('SISMEMBER', job .. ':todo', batch) == 0 then
  return {'done'}
end
local holder = redis.call('HGET', job .. ':leases', batch)
if holder and holder ~= lease then -- the same lease: this call is repeated, its first answer was lost
  local state, worker = lease_state(holder, oldest_s), lease_parts(holder)
  if state == 'held' then
    return {'held'}
  end
  if state == 'dead' and count_loss(job, batch, worker, most_losses, now, failed_ttl) then
    return {'ended'}
  end
end
redis.call('HSET', job .. ':leases', batch, lease)
if status == 'queued' then
  redis.call('HSET', job, 'status', 'running', 'started_at', now)
end
touch(job, ttl)
return {'ok', model, spec, redis.call('HGET', job .. ':nonces', batch), kind}
