-- Stores the values of a batch's nonces, in the order of the batch. A second completion changes nothing.
--
-- KEYS: 1 job       its hash; its working keys are this plus a suffix
-- ARGV: 1 batch     its index
--       2 second    now, whole seconds since the epoch
--       3 ttl       seconds the job is kept without progress
--       4 n_values
--       5 values    as JSON texts, one a line
-- Returns 1 when all batches of the job are done and it waits to be finished, else 0.
local job = KEYS[1]
local batch, second, ttl, n_values, values = unpack(ARGV)
if not is_active(redis.call('HGET', job, 'status')) then
  return 0
end
local nonces = redis.call('HGET', job .. ':nonces', batch)
if not nonces then
  return redis.error_reply('ERR the job has no batch ' .. batch)
end
if count_nonces(nonces) ~= tonumber(n_values) then
  return redis.error_reply('ERR batch ' .. batch .. ' has another number of nonces than the values given')
end
if redis.call('SREM', job .. ':todo', batch) == 1 then
  redis.call('HSET', job .. ':values', batch, values)
  redis.call('HDEL', job, 'waiting_for')
  local lease = redis.call('HGET', job .. ':leases', batch)
  local worker = lease and lease_parts(lease) or 'unknown' -- its lease was taken from it
  redis.call('HINCRBY', job, 'by:' .. name_of_worker(worker), n_values)
  redis.call('HDEL', job .. ':leases', batch)
  redis.call('HDEL', job .. ':attempts', batch)
  redis.call('HINCRBY', job, 'n_done', n_values)
  redis.call('DECRBY', 'poc:queued_nonces', n_values)
  count_processed(n_values, second, worker, ttl)
  touch(job, ttl)
end
return redis.call('SCARD', job .. ':todo') == 0 and 1 or 0
