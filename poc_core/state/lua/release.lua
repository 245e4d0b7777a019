-- Gives back a lease that its worker did not compute. A lost engine is counted for a job's batch, and may fail the job.
--
-- KEYS: 1 work           the hash of a job or a round; its working keys are this plus a suffix
-- ARGV: 1 lease          for a job: the batch's index; for a round: the lease's name (member)
--       2 worker         id of the worker that has the lease
--       3 lost_engine    '1' if a job's lease ended because the worker's engine was lost
--       4 most_losses    number of lost workers and engines during one batch that fails the job
--       5 now            seconds since the epoch
--       6 failed_ttl     seconds for which a failed job is kept
-- Returns 1 if the lease now waits for another worker, else 0.
local work = KEYS[1]
local lease, worker, lost_engine, most_losses, now, failed_ttl = unpack(ARGV)
local held = redis.call('HGET', work .. ':leases', lease)
if not held or lease_parts(held) ~= worker then
  return 0
end
free_lease(work, lease)
if lost_engine == '1' and count_loss(work, lease, worker, most_losses, now, failed_ttl) then
  return 0
end
return 1
