-- Cancels some of a model's active jobs, the oldest first, and with the last one drops the messages of their batches.
--
-- KEYS: 1 active    the index: zset job id -> creation time
--       2 queue     the list of the model's messages
-- ARGV: 1 most      jobs
--       2 now       seconds since the epoch
--       3 ttl       seconds a cancelled job is kept
-- Returns {jobs looked at, jobs cancelled}.
local active, queue = unpack(KEYS)
local most, now, ttl = unpack(ARGV)
local n_cancelled = 0

local function cancel(id)
  local job = 'poc:job:' .. id
  if is_active(redis.call('HGET', job, 'status')) then
    retire(job, 'cancelled', now, ttl)
    n_cancelled = n_cancelled + 1
  end
end

local ids = redis.call('ZRANGE', active, 0, string.format('%d', most - 1))
for _, id in ipairs(ids) do
  pcall(cancel, id)
  redis.call('ZREM', active, id) -- also one that expired, or whose record cannot be read
end
-- No job is left whose batches a message could mean; one that comes later is stored before its messages are sent.
if redis.call('ZCARD', active) == 0 then
  redis.call('UNLINK', queue)
end
return {#ids, n_cancelled}
