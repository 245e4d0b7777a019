-- Leases a worker what is next in a model's line: validations before other jobs, older jobs first. Either one batch of any
-- spec, or further ones of a spec to be computed together with it. A batch that a worker or engine was lost on is computed
-- alone: if it kills its workers, it must not take others with it.
--
-- KEYS: 1 line          zset of the jobs with batches to lease (join_line)
--       2 generating    the key that says for which round the model's workers compute
-- ARGV: 1 lease         as lease_parts reads it
--       2 now           seconds since the epoch
--       3 ttl           seconds a job is kept without progress
--       4 from          score in the line: validations' are below 0, other jobs' are not
--       5 to            score in the line
--       6 spec          of which all are to be, or '' for one batch of any
--       7 room          nonces, all batches together, where there is a spec; else 1
--       8 most_jobs     with batches left for others, which are passed by
-- Returns {spec, kind, whether it is to be computed alone: '1', then id of the job, batch, its nonces, ...}, or {}.
local line, generating = unpack(KEYS)
local lease, now, ttl, from, to, spec, room, most_jobs = unpack(ARGV)
room, most_jobs = tonumber(room), tonumber(most_jobs)
local is_any = spec == ''
local found = {}

-- Leases batches of a job while there is room: those that came back first, then from `next` on, below which all were leased
-- once. Returns whether the job has more.
local function take_from(id)
  local job = 'poc:job:' .. id
  local status, own_spec, kind, n_batches, cursor = unpack(redis.call('HMGET', job, 'status', 'spec', 'kind', 'n_batches', 'next'))
  if not is_active(status) then
    return false
  end
  if not is_any and own_spec ~= spec then
    return true
  end
  n_batches = math.min(tonumber(n_batches), redis.call('HLEN', job .. ':nonces')) -- however many it is said to have
  cursor = tonumber(cursor or 0)
  local n_before, has_more = #found, true
  while room > 0 do
    local returned = redis.call('ZRANGE', job .. ':free', 0, 0)[1]
    if not returned and cursor >= n_batches then
      has_more = false
      break
    end
    local batch = returned or string.format('%d', cursor)
    if redis.call('SISMEMBER', job .. ':todo', batch) == 1 and redis.call('HEXISTS', job .. ':leases', batch) == 0 then
      local is_suspect = redis.call('HEXISTS', job .. ':attempts', batch) == 1
      local nonces = redis.call('HGET', job .. ':nonces', batch)
      local n = count_nonces(nonces)
      if not is_any and (is_suspect or n > room) then
        break
      end
      redis.call('HSET', job .. ':leases', batch, lease)
      if #found == 0 then
        found = {own_spec, kind, is_suspect and '1' or '0'}
      end
      for _, value in ipairs({id, batch, nonces}) do
        found[#found + 1] = value
      end
      room = is_any and 0 or room - n
    end
    if returned then
      redis.call('ZREM', job .. ':free', batch)
    else
      cursor = cursor + 1
    end
  end
  redis.call('HSET', job, 'next', string.format('%d', cursor))
  if #found > n_before then
    redis.call('HDEL', job, 'waiting_for')
    if status == 'queued' then
      redis.call('HSET', job, 'status', 'running', 'started_at', now)
    end
    touch(job, ttl)
  end
  return has_more
end

if redis.call('EXISTS', generating) == 1 then
  return {}
end
local n_passed = 0
while room > 0 and n_passed < most_jobs do
  local id = redis.call('ZRANGEBYSCORE', line, from, to, 'LIMIT', n_passed, 1)[1]
  if not id then
    break
  end
  local is_read, has_more = pcall(take_from, id)
  if is_read and has_more then
    n_passed = n_passed + 1
  elseif is_read or not is_full(has_more) then
    redis.call('ZREM', line, id) -- also one whose record cannot be read, which whoever looks over all jobs fails
  else
    return redis.error_reply("OOM command not allowed when used memory > 'maxmemory'")
  end
end
return found
