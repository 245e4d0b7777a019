-- Leases a batch to a worker. A lease holds while its worker's key exists and it is not too old: then its worker forgot it.
-- KEYS: 1 job. ARGV: 1 batch, 2 lease, 3 now, 4 ttl, 5 most losses, 6 ttl of a failed job, 7 oldest second of a lease.
-- Returns {reason} with gone, ended, round, done or held, or {'ok', model, spec, nonces}.
local job = KEYS[1]
local fields = redis.call('HMGET', job, 'status', 'model', 'spec')
if not fields[1] then
  return {'gone'}
end
if not is_active(fields[1]) then
  return {'ended'}
end
if redis.call('EXISTS', 'poc:round:generating:' .. fields[2]) == 1 then
  return {'round'}
end
if redis.call('SISMEMBER', job .. ':todo', ARGV[1]) == 0 then
  return {'done'}
end
local holder = redis.call('HGET', job .. ':leases', ARGV[1])
if holder and holder ~= ARGV[2] then -- the same lease: this call is repeated, its first answer was lost
  local worker, since = lease_parts(holder)
  local alive = redis.call('EXISTS', 'poc:worker:' .. worker) == 1
  if alive and tonumber(since) >= tonumber(ARGV[7]) then
    return {'held'}
  end
  if not alive and count_loss(job, ARGV[1], ARGV[5], ARGV[3], ARGV[6]) then
    return {'ended'}
  end
end
redis.call('HSET', job .. ':leases', ARGV[1], ARGV[2])
if fields[1] == 'queued' then
  redis.call('HSET', job, 'status', 'running', 'started_at', ARGV[3])
end
touch(job, ARGV[4])
return {'ok', fields[2], fields[3], redis.call('HGET', job .. ':nonces', ARGV[1])}
