-- Returns a worker's lease uncomputed. A lost engine counts against a job's batch and may fail the job.
--
-- KEYS: 1 work           the hash of a job or a round; its working keys are this plus a suffix
-- ARGV: 1 lease          its batch, or its first place and places (member)
--       2 worker         that held the lease
--       3 lost_engine    '1' if the engine was lost
--       4 most_losses    lost workers or engines that fail a job
--       5 now            seconds since the epoch
--       6 failed_ttl     seconds a failed job is kept
-- Returns 1 if the lease waits for another worker, else 0.
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
