-- Finds a batch of a model's validations that no worker computes, the oldest validation's first.
--
-- KEYS: 1 validations   zset job id -> creation time
--       2 generating    the key that says for which round the model's workers compute
-- ARGV: 1 oldest_s      second since the epoch before which a lease is too old
-- Returns {id of the job, batch}, or {} where there is none or a round has the workers.
local validations, generating = unpack(KEYS)
local oldest_s = ARGV[1]
if redis.call('EXISTS', generating) == 1 then
  return {}
end

-- The first batch of a job that is to be had, or nothing.
local function first_free(job)
  local leases, held, first = redis.call('HGETALL', job .. ':leases'), {}, nil
  for i = 1, #leases, 2 do
    held[leases[i]] = lease_state(leases[i + 1], oldest_s) == 'held'
  end
  for _, batch in ipairs(redis.call('SMEMBERS', job .. ':todo')) do
    if not held[batch] and tonumber(batch) < (first or math.huge) then
      first = tonumber(batch)
    end
  end
  return first
end

for _, id in ipairs(redis.call('ZRANGE', validations, 0, -1)) do
  local job = 'poc:job:' .. id
  local is_read, status = pcall(redis.call, 'HGET', job, 'status')
  if not is_read or not is_active(status) then
    redis.call('ZREM', validations, id) -- it expired, or its record cannot be read
  else
    local first = first_free(job)
    if first then
      return {id, string.format('%d', first)}
    end
  end
end
return {}
