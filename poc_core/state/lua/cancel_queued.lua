-- Looks at some of a model's jobs. Cancels those that have not started and whose client does not wait for
-- the answer.
--
-- KEYS: 1 active     the index: zset job id -> creation time
-- ARGV: 1 first      rank in the index of the first job to look at
--       2 most       most jobs to look at
--       3 now        seconds since the epoch
--       4 ttl        seconds a cancelled job is kept
-- Returns the number of cancelled jobs.
local active = KEYS[1]
local first, most, now, ttl = unpack(ARGV)
local n_cancelled = 0

-- Cancels a job if possible. Returns true if the job must stay in the index.
local function look(id)
  local job = 'poc:job:' .. id
  local status, inline = unpack(redis.call('HMGET', job, 'status', 'inline'))
  if status == 'running' or (status == 'queued' and inline == '1') then
    return true
  end
  if status == 'queued' then
    retire(job, 'cancelled', now, ttl)
    n_cancelled = n_cancelled + 1
  end
  return false
end

local ids = redis.call('ZRANGE', active, first, string.format('%d', first + most - 1))
for _, id in ipairs(ids) do
  local is_read, stays = pcall(look, id)
  if not is_read and is_full(stays) then -- Redis is full: a job that cannot be cancelled now must not be forgotten
    return redis.error_reply("OOM command not allowed when used memory > 'maxmemory'")
  end
  if not (is_read and stays) then
    redis.call('ZREM', active, id) -- also a job that expired, or has an unreadable record
  end
end
return n_cancelled
