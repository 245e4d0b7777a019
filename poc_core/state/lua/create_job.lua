-- Turns staged nonces (and claims) into a queued job, unless too many nonces, jobs or callbacks would wait.
--
-- KEYS: 1 job            its hash; its working keys are this plus a suffix
-- ARGV: 1 job_id
--       2 model
--       3 n_total        nonces
--       4 n_batches
--       5 most_queued    nonces that may wait over all jobs
--       6 most_jobs      that may not have ended
--       7 most_callbacks jobs whose callback may wait, or '' for a job without one
--       8 most_bytes     of callbacks that wait, over all jobs
--       9 now            seconds since the epoch
--      10 ttl            seconds the job is kept without progress
--      11... field, value, ... of the hash
-- Returns {'stored'} (also for a repeated call), {'nonces' or 'jobs', how many there are already}, or {'callbacks'}.
local job = KEYS[1]
local job_id, model, n_total, n_batches, most_queued = unpack(ARGV, 1, 5)
local most_jobs, most_callbacks, most_bytes, now, ttl = unpack(ARGV, 6, 10)
local first_field = 11
n_total, n_batches = tonumber(n_total), tonumber(n_batches)
if redis.call('EXISTS', job) == 1 then
  return {'stored'}
end
local n_jobs = 0
for _, served in ipairs(redis.call('SMEMBERS', 'poc:jobs:models')) do
  n_jobs = n_jobs + redis.call('ZCARD', 'poc:jobs:active:' .. served)
end
if n_jobs >= tonumber(most_jobs) then
  redis.call('UNLINK', job .. ':nonces', job .. ':claimed')
  return {'jobs', n_jobs}
end
if most_callbacks ~= '' and (redis.call('SCARD', 'poc:outbox:jobs') >= tonumber(most_callbacks) or
    tonumber(redis.call('GET', 'poc:outbox:job_bytes') or '0') >= tonumber(most_bytes)) then
  redis.call('UNLINK', job .. ':nonces', job .. ':claimed')
  return {'callbacks'}
end
local queued = tonumber(redis.call('GET', 'poc:queued_nonces') or '0')
if queued < 0 then
  queued = 0
  redis.call('SET', 'poc:queued_nonces', '0')
end
if queued + n_total > tonumber(most_queued) then
  redis.call('UNLINK', job .. ':nonces', job .. ':claimed')
  return {'nonces', queued}
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
redis.call('LPUSH', 'poc:jobs:newest', job_id)
redis.call('LTRIM', 'poc:jobs:newest', 0, 99)
redis.call('EXPIRE', 'poc:jobs:newest', ttl)
if most_callbacks ~= '' then -- its place, before it is computed: later it could not be refused any more
  redis.call('SADD', 'poc:outbox:jobs', job_id)
  redis.call('EXPIRE', 'poc:outbox:jobs', ttl)
end
touch(job, ttl)
return {'stored'}
