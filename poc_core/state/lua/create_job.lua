-- Makes a queued job of nonces and claims that were uploaded before. Refuses the job if too many nonces, jobs or
-- callbacks would wait.
--
-- KEYS: 1 job            its hash; its working keys are this plus a suffix
-- ARGV: 1 job_id
--       2 model
--       3 n_total        number of the job's nonces
--       4 n_batches      number of the job's batches
--       5 most_queued    most nonces that may wait, of all jobs together
--       6 most_jobs      most jobs that may be active
--       7 most_callbacks most jobs whose callback may wait; '' if this job has no callback
--       8 most_bytes     most bytes of waiting callbacks, of all jobs together
--       9 receiver       host:port to which the callback goes, or ''
--      10 client         id of the client
--      11 now            seconds since the epoch
--      12 ttl            seconds the job is kept without progress
--      13 n_claimed      number of the job's claims
--      14... field, value, ... of the job's hash
-- Returns {'stored'}, also if the call is repeated. Returns for a refused job {'nonces', queued nonces},
-- {'jobs', active jobs} or {'callbacks', the limit that is reached: see full_of}; {'gone'} if Redis has lost uploaded
-- nonces or claims.
local job = KEYS[1]
local job_id, model, n_total, n_batches, most_queued = unpack(ARGV, 1, 5)
local most_jobs, most_callbacks, most_bytes, receiver, client, now, ttl, n_claimed = unpack(ARGV, 6, 13)
local first_field = 14
n_total, n_batches = tonumber(n_total), tonumber(n_batches)

-- Share of most_callbacks and of most_bytes that one client, or one receiver, may use.
local SHARE = 0.25

-- Returns whose limit of waiting callbacks is reached: that of 'all', of the 'client' or of the 'receiver'. Returns nil
-- if none is reached.
local function full_of()
  local n, bytes = {client = 0, receiver = 0}, {client = 0, receiver = 0}
  local places = redis.call('HGETALL', 'poc:outbox:of_jobs')
  for i = 1, #places, 2 do
    local to, owner = string.match(places[i + 1], '^%S+ (%S*) (.*)$')
    for who, is_it in pairs({client = owner == client, receiver = to == receiver}) do
      if is_it then
        n[who] = n[who] + 1
        bytes[who] = bytes[who] + (tonumber(redis.pcall('HGET', 'poc:outbox:' .. places[i], 'bytes')) or 0)
      end
    end
  end
  local all_bytes = tonumber(redis.call('GET', 'poc:outbox:job_bytes') or '0')
  if #places / 2 >= tonumber(most_callbacks) or all_bytes >= tonumber(most_bytes) then
    return 'all'
  end
  for who in pairs(n) do
    if n[who] >= SHARE * most_callbacks or bytes[who] >= SHARE * most_bytes then
      return who
    end
  end
end

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
local queued = tonumber(redis.call('GET', 'poc:queued_nonces') or '0')
if queued < 0 then
  queued = 0
  redis.call('SET', 'poc:queued_nonces', '0')
end
if queued + n_total > tonumber(most_queued) then
  redis.call('UNLINK', job .. ':nonces', job .. ':claimed')
  return {'nonces', queued}
end
if redis.call('HLEN', job .. ':nonces') ~= n_batches or redis.call('HLEN', job .. ':claimed') ~= tonumber(n_claimed) then
  return {'gone'} -- Redis failed over, or lost its last second
end
local whose = most_callbacks ~= '' and full_of()
if whose then
  redis.call('UNLINK', job .. ':nonces', job .. ':claimed')
  return {'callbacks', whose}
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
if most_callbacks ~= '' then -- counted before the job is computed, because a computed job cannot be refused
  redis.call('HSET', 'poc:outbox:of_jobs', job_id, now .. ' ' .. receiver .. ' ' .. client)
  redis.call('EXPIRE', 'poc:outbox:of_jobs', ttl)
end
touch(job, ttl)
join_line(job)
return {'stored'}
