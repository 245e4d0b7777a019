-- Turns staged nonces (and claims) into a queued job, unless too many nonces would wait.
--
-- KEYS: 1 job            its hash; its working keys are this plus a suffix
-- ARGV: 1 job_id
--       2 model
--       3 n_total        nonces
--       4 n_batches
--       5 most_queued    nonces that may wait over all jobs
--       6 now            seconds since the epoch
--       7 ttl            seconds the job is kept without progress
--       8... field, value, ... of the hash
-- Returns -1 when stored (or already stored: a repeated call), else how many nonces wait.
local job = KEYS[1]
local job_id, model, n_total, n_batches, most_queued, now, ttl = unpack(ARGV, 1, 7)
local first_field = 8
n_total, n_batches = tonumber(n_total), tonumber(n_batches)
if redis.call('EXISTS', job) == 1 then
  return -1
end
local queued = tonumber(redis.call('GET', 'poc:queued_nonces') or '0')
if queued < 0 then
  queued = 0
  redis.call('SET', 'poc:queued_nonces', '0')
end
if queued + n_total > tonumber(most_queued) then
  redis.call('UNLINK', job .. ':nonces', job .. ':claimed')
  return queued
end
if redis.call('HLEN', job .. ':nonces') ~= n_batches then
  return redis.error_reply('ERR the staged nonces are gone; send the request again')
end
redis.call('HSET', job, unpack(ARGV, first_field))
for first = 0, n_batches - 1, CHUNK do
  local indexes = {}
  for index = first, math.min(first + CHUNK, n_batches) - 1 do
    indexes[#indexes + 1] = string.format('%d', index)
  end
  redis.call('SADD', job .. ':todo', unpack(indexes))
end
redis.call('INCRBY', 'poc:queued_nonces', string.format('%d', n_total))
redis.call('ZADD', 'poc:jobs:active:' .. model, now, job_id)
redis.call('SADD', 'poc:jobs:models', model)
touch(job, ttl)
return -1
