-- Checks some of a model's active jobs. Frees leases that no worker holds, and removes ended jobs from the index.
-- Counts a dead worker as a loss during its batch, so that no batch kills workers forever. Adds a job with batches to
-- lease to the model's line if the job is missing there, because an earlier release stored it, or Redis lost the entry.
--
-- KEYS: 1 active         the index: zset job id -> creation time
-- ARGV: 1 first          rank of the job to begin with
--       2 most           most jobs to check
--       3 most_losses    number of lost workers and engines during one batch that fails the job
--       4 now            seconds since the epoch
--       5 failed_ttl     seconds for which a failed job is kept
-- Returns {checked jobs that stay in the index, jobs removed, leases freed, unfinished, broken}. `unfinished` lists the
-- ids of jobs whose batches are all done. `broken` lists the ids of jobs whose record is unreadable.
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
