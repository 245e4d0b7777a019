-- Looks through some of a model's active jobs for what others left behind: frees the leases of workers that died or do not hold
-- them, and drops from the index what is over. A dead worker counts as a loss: a batch that kills its workers must not do so
-- for ever. A job with batches to lease that is not in the line joins it: an earlier release stored it, or Redis forgot.
--
-- KEYS: 1 active         the index: zset job id -> creation time
-- ARGV: 1 first          rank of the job to begin with
--       2 most           jobs
--       3 most_losses    of workers or engines, with which a job fails
--       4 now            seconds since the epoch
--       5 failed_ttl     seconds a job that fails is kept
-- Returns {jobs looked at and still there, jobs dropped, leases freed, unfinished, broken}; of the last two each is a list of
-- ids: all batches done, a record that cannot be read.
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
