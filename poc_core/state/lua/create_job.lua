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
--       9 receiver       host:port of its callback
--      10 client         who asks
--      11 now            seconds since the epoch
--      12 ttl            seconds the job is kept without progress
--      13 breaks_at      tries in a row without an answer after which a receiver is not waited for
--      14... field, value, ... of the hash
-- Returns {'stored'} (also for a repeated call), {'nonces' or 'jobs', how many there are already}, or {'callbacks'}.
local job = KEYS[1]
local job_id, model, n_total, n_batches, most_queued = unpack(ARGV, 1, 5)
local most_jobs, most_callbacks, most_bytes, receiver, client, now, ttl, breaks_at = unpack(ARGV, 6, 13)
local first_field = 14
n_total, n_batches = tonumber(n_total), tonumber(n_batches)

-- What clients hold of callbacks: their number, or their bytes, by client; and the places of each, by id.
local function holdings(by_bytes)
  local held, places = {}, {}
  local found = redis.call('HGETALL', 'poc:outbox:of_jobs')
  for i = 1, #found, 2 do
    local id, place = found[i], found[i + 1]
    local since, owner = string.match(place, '^(%S+) %S* (.*)$')
    local bytes = by_bytes and tonumber(redis.pcall('HGET', 'poc:outbox:' .. id, 'bytes')) or 0
    local size = by_bytes and bytes or 1
    if owner then
      held[owner] = (held[owner] or 0) + size
      places[owner] = places[owner] or {}
      table.insert(places[owner], {id = id, place = place, since = tonumber(since) or 0, size = size})
    end
  end
  return held, places
end

-- The client with the largest value, if that is more than `than`.
local function largest_of(sizes, than)
  local found
  for owner, size in pairs(sizes) do
    if size > (found and sizes[found] or than) then
      found = owner
    end
  end
  return found
end

-- Whether nobody takes what is, or will be, at a place: of a job not computed yet it is known only that its receiver has
-- not answered for long.
local function is_in_vain(one)
  if one.size == 0 then
    return false
  end
  if redis.call('EXISTS', 'poc:outbox:' .. one.id) == 1 then
    return is_failing(one.id, one.place, 1)
  end
  local silent = redis.pcall('HGET', 'poc:receiver:' .. string.match(one.place, '^%S+ (%S*)'), 'failures')
  return (tonumber(silent) or 0) >= tonumber(breaks_at)
end

-- Where the oldest of these places is whose receiver does not take its callback; nil: there is none.
local function oldest_failing(of_owner)
  local oldest
  for at, one in ipairs(of_owner) do
    if (not oldest or one.since < of_owner[oldest].since) and is_in_vain(one) then
      oldest = at
    end
  end
  return oldest
end

-- What clients hold of places whose receivers do not take what is in them; and all of it.
local function failing_of(places)
  local failing, total = {}, 0
  for owner, of_owner in pairs(places) do
    for _, one in ipairs(of_owner) do
      if is_in_vain(one) then
        failing[owner] = (failing[owner] or 0) + one.size
        total = total + one.size
      end
    end
  end
  return failing, total
end

-- Whether neither the client nor its receiver holds anything, or each less than half of what the greediest one does.
local function holds_little(places)
  local by_client, by_receiver = {}, {}
  for owner, of_owner in pairs(places) do
    by_client[owner] = #of_owner
    for _, one in ipairs(of_owner) do
      local to = string.match(one.place, '^%S+ (%S*)')
      by_receiver[to] = (by_receiver[to] or 0) + 1
    end
  end
  local own = math.max(by_client[client] or 0, by_receiver[receiver] or 0)
  local greediest = by_client[largest_of(by_client, 0)] or 0
  greediest = math.max(greediest, by_receiver[largest_of(by_receiver, 0)] or 0)
  return own == 0 or own < greediest / 2
end

-- Whether a callback of the client has a place. Where all are taken, those whose receivers do not take them give way: the
-- oldest of who holds most, if that is more than the client. Else, to a client whose receiver is not known to be silent,
-- those beyond half of all places: however many clients hold them, they may never be wanted. While nothing is known of
-- those yet, a quarter of all places is there beyond them for who holds little.
local function has_place()
  local left = tonumber(most_callbacks) - redis.call('HLEN', 'poc:outbox:of_jobs')
  local bytes_left = tonumber(most_bytes) - tonumber(redis.call('GET', 'poc:outbox:job_bytes') or '0')
  if left > 0 and bytes_left > 0 then
    return true
  end
  local by_bytes = bytes_left <= 0
  local held, places = holdings(by_bytes)

  local function give_way(owner, at)
    local one = table.remove(places[owner], at)
    drop_callback(one.id, 'its receiver does not take it, and others need the place.', now, ttl)
    if is_active(redis.pcall('HGET', 'poc:job:' .. one.id, 'status')) then
      redis.call('HSET', 'poc:job:' .. one.id, 'sends_nothing', '1')
    end
    left, bytes_left = left + 1, bytes_left + (by_bytes and one.size or 0)
    return one.size
  end

  local own = held[client] or 0
  while left <= 0 or bytes_left <= 0 do
    local largest = largest_of(held, own)
    local oldest = largest and oldest_failing(places[largest])
    if oldest then
      held[largest] = held[largest] - give_way(largest, oldest)
    elseif largest then
      held[largest] = nil
    else
      break
    end
  end
  if left > 0 and bytes_left > 0 then
    return true
  end
  if redis.call('EXISTS', 'poc:receiver:' .. receiver) == 1 then
    return false
  end
  local failing, n_failing = failing_of(places)
  local half = tonumber(by_bytes and most_bytes or most_callbacks) / 2
  while left <= 0 or bytes_left <= 0 do
    local largest = n_failing > half and largest_of(failing, 0)
    if not largest then
      return not by_bytes and -left < tonumber(most_callbacks) / 4 and holds_little(places)
    end
    local size = give_way(largest, oldest_failing(places[largest]))
    failing[largest], n_failing = failing[largest] - size, n_failing - size
  end
  return true
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
if redis.call('HLEN', job .. ':nonces') ~= n_batches then
  return redis.error_reply('ERR the staged nonces are gone; send the request again')
end
if most_callbacks ~= '' and not has_place() then
  redis.call('UNLINK', job .. ':nonces', job .. ':claimed')
  return {'callbacks'}
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
join_line(job)
redis.call('SADD', 'poc:jobs:models', model)
redis.call('LPUSH', 'poc:jobs:newest', job_id)
redis.call('LTRIM', 'poc:jobs:newest', 0, 99)
redis.call('EXPIRE', 'poc:jobs:newest', ttl)
if most_callbacks ~= '' then -- its place, before it is computed: later it could not be refused any more
  redis.call('HSET', 'poc:outbox:of_jobs', job_id, now .. ' ' .. receiver .. ' ' .. client)
  redis.call('EXPIRE', 'poc:outbox:of_jobs', ttl)
end
touch(job, ttl)
return {'stored'}
