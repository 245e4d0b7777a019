-- Counts some of a model's active jobs by status.
--
-- KEYS: 1 active    the index: zset job id -> creation time
-- ARGV: 1 first     rank of the job to begin with
--       2 most      most jobs to look at
-- Returns {jobs looked at, queued jobs, running jobs, queued or running jobs that wait for chat}.
local active = KEYS[1]
local first, most = unpack(ARGV)
local ids = redis.call('ZRANGE', active, first, string.format('%d', first + most - 1))
local counts = {queued = 0, running = 0, chat = 0}
for _, id in ipairs(ids) do
  for _, found in pairs(redis.call('HMGET', 'poc:job:' .. id, 'status', 'waiting_for')) do
    if counts[found] then
      counts[found] = counts[found] + 1
    end
  end
end
return {#ids, counts.queued, counts.running, counts.chat}
