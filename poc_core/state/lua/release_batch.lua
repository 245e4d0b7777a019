-- Gives a worker's lease back. With a lost engine it counts against the batch and may fail the job.
--
-- KEYS: 1 job            its hash; its working keys are this plus a suffix
-- ARGV: 1 batch          its index
--       2 worker         who held it
--       3 lost_engine    '1' when the engine was lost
--       4 most_losses    of workers or engines, with which the job fails
--       5 now            seconds since the epoch
--       6 failed_ttl     seconds a job that fails is kept
-- Returns 1 when the batch waits for another worker, else 0.
local job = KEYS[1]
local batch, worker, lost_engine, most_losses, now, failed_ttl = unpack(ARGV)
local lease = redis.call('HGET', job .. ':leases', batch)
if not lease or lease_parts(lease) ~= worker then
  return 0
end
free_batch(job, batch)
if lost_engine == '1' and count_loss(job, batch, worker, most_losses, now, failed_ttl) then
  return 0
end
return 1
