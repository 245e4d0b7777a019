-- Removes the leases that do not hold (lease_state). A dead worker counts as a loss: a batch that kills its workers must
-- not do so for ever.
--
-- KEYS: 1 job            its hash; its working keys are this plus a suffix
-- ARGV: 1 most_losses    of workers or engines, with which the job fails
--       2 now            seconds since the epoch
--       3 failed_ttl     seconds a job that fails is kept
--       4 oldest_s       second since the epoch before which a lease is too old
-- Returns the batches that wait for another worker.
local job = KEYS[1]
local most_losses, now, failed_ttl, oldest_s = unpack(ARGV)
local freed = {}
local leases = redis.call('HGETALL', job .. ':leases')
for i = 1, #leases, 2 do
  local batch = leases[i]
  local state = lease_state(leases[i + 1], oldest_s)
  if state ~= 'held' then
    free_batch(job, batch)
    local worker = lease_parts(leases[i + 1])
    if state == 'dead' and count_loss(job, batch, worker, most_losses, now, failed_ttl) then
      return {}
    end
    freed[#freed + 1] = batch
  end
end
return freed
