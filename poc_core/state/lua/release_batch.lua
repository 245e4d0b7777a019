-- Gives a worker's lease back. With a lost engine it counts against the batch and may fail the job.
-- KEYS: 1 job. ARGV: 1 batch, 2 worker id, 3 '1' when the engine was lost, 4 most losses, 5 now, 6 ttl of a failed job.
-- Returns 1 when the batch waits for another worker, else 0.
local job = KEYS[1]
local lease = redis.call('HGET', job .. ':leases', ARGV[1])
if not lease or lease_parts(lease) ~= ARGV[2] then
  return 0
end
redis.call('HDEL', job .. ':leases', ARGV[1])
if ARGV[3] == '1' and count_loss(job, ARGV[1], ARGV[4], ARGV[5], ARGV[6]) then
  return 0
end
return 1
