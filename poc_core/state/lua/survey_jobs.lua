-- Checks some of a model's active jobs: frees leases of dead workers and leases that no longer hold, and removes jobs
-- that are over from the index. A dead worker counts as a loss, so that no batch kills workers forever. A job with
-- batches to lease joins the line if missing there: an earlier release stored it, or Redis lost the entry.
--
-- KEYS: 1 active         the index: zset job id -> creation time
-- ARGV: 1 first          rank of the job to begin with
--       2 most           jobs
--       3 most_losses    lost workers or engines that fail a job
--       4 now            seconds since the epoch
--       5 failed_ttl     seconds a failed job is kept
-- Returns {jobs looked at that stay, jobs dropped, leases freed, unfinished, broken}. The last two are lists of ids:
-- jobs with all batches done, and jobs whose record cannot be read.
local active = KEYS[1]
local first, most, most_losses, now, failed_ttl = unpack(ARGV)
local unfinished, broken = {}, {}
local n_kept, n_dropped, n_freed = 0, 0, 0

local function look(id)
  local job = 'poc:job:' .. id
  if not is_active(redis.call('HGET', job, 'status')) then
    redis.call('ZREM', active, id)
    n_dropped = n_dropped + 1
    return
  end
  local n_todo = redis.call('SCARD', job .. ':todo')
  if n_todo == 0 then
    n_kept = n_kept + 1
    unfinished[#unfinished + 1] = id
    return
  end
  if n_todo > redis.call('HLEN', job .. ':leases') and join_line(job) then
    redis.call('HDEL', job, 'next')
    redis.call('EXPIRE', 'poc:jobs:line:' .. redis.call('HGET', job, 'model'), redis.call('TTL', job))
  end
  local freed = free_lost(job)
  n_freed = n_freed + #freed
  for _, one in ipairs(freed) do
    if one.is_dead and count_loss(job, one.lease, one.worker, most_losses, now, failed_ttl) then
      n_dropped = n_dropped + 1
      return
    end
  end
  n_kept = n_kept + 1
end

for _, id in ipairs(redis.call('ZRANGE', active, first, string.format('%d', first + most - 1))) do
  local is_read, why = pcall(look, id)
  if not is_read then
    n_kept = n_kept + 1
    if not is_full(why) then
      broken[#broken + 1] = id
    end
  end
end
return {n_kept, n_dropped, n_freed, unfinished, broken}
