-- Removes the leases of dead workers and those that their worker forgot. A dead worker counts as a loss: a batch that
-- kills its workers must not do so for ever.
-- KEYS: 1 job. ARGV: 1 most losses, 2 now, 3 ttl of a failed job, 4 oldest second of a lease.
-- Returns the batches that wait for another worker.
local job, freed = KEYS[1], {}
local leases = redis.call('HGETALL', job .. ':leases')
for i = 1, #leases, 2 do
  local worker, since = lease_parts(leases[i + 1])
  local alive = redis.call('EXISTS', 'poc:worker:' .. worker) == 1
  if not alive or tonumber(since) < tonumber(ARGV[4]) then
    redis.call('HDEL', job .. ':leases', leases[i])
    if not alive and count_loss(job, leases[i], ARGV[1], ARGV[2], ARGV[3]) then
      return {}
    end
    freed[#freed + 1] = leases[i]
  end
end
return freed
