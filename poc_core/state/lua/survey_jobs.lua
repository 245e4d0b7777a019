-- Looks through some of a model's active jobs for what others left behind, and drops from the index what is over. A job with
-- batches to lease that is not in the line joins it: an earlier release stored it, or Redis forgot.
--
-- KEYS: 1 active      the index: zset job id -> creation time
-- ARGV: 1 first       rank of the job to begin with
--       2 most        jobs
--       3 oldest_s    second since the epoch before which a lease is too old
-- Returns {jobs looked at and still there, jobs dropped, unfinished, orphaned, broken}; of the last three each is a list of
-- ids: all batches done, a batch whose lease has ended, a record that cannot be read.
local active = KEYS[1]
local first, most, oldest_s = unpack(ARGV)
local unfinished, orphaned, broken = {}, {}, {}
local n_kept, n_dropped = 0, 0

local function look(id)
  local job = 'poc:job:' .. id
  if not is_active(redis.call('HGET', job, 'status')) then
    redis.call('ZREM', active, id)
    n_dropped = n_dropped + 1
    return
  end
  n_kept = n_kept + 1
  local n_todo = redis.call('SCARD', job .. ':todo')
  if n_todo == 0 then
    unfinished[#unfinished + 1] = id
    return
  end
  local leases = redis.call('HGETALL', job .. ':leases')
  for i = 2, #leases, 2 do
    if lease_state(leases[i], oldest_s) ~= 'held' then
      orphaned[#orphaned + 1] = id
      break
    end
  end
  if n_todo > #leases / 2 and join_line(job) then
    redis.call('HDEL', job, 'next')
    redis.call('EXPIRE', 'poc:jobs:line:' .. redis.call('HGET', job, 'model'), redis.call('TTL', job))
  end
end

for _, id in ipairs(redis.call('ZRANGE', active, first, string.format('%d', first + most - 1))) do
  local is_read, why = pcall(look, id)
  if not is_read and not is_full(why) then
    broken[#broken + 1] = id
  end
end
return {n_kept + #broken, n_dropped, unfinished, orphaned, broken}
