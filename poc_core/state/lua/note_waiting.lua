-- Stores what some jobs wait for. A worker has leased their batches, or would do so.
--
-- KEYS: jobs      their hashes; working keys are these plus a suffix
-- ARGV: 1 what    they wait for, or '' if they continue
--       2 ttl     seconds a job is kept without progress
-- Returns 1 if a job can be computed: it is active and, if it waits, no round has the workers; else 0.
local what, ttl = unpack(ARGV)
local is_wanted = 0
for _, job in ipairs(KEYS) do
  local status, model, waiting_for = unpack(redis.call('HMGET', job, 'status', 'model', 'waiting_for'))
  if is_active(status) and (what == '' or redis.call('EXISTS', 'poc:round:generating:' .. model) == 0) then
    is_wanted = 1
    if what ~= '' then
      redis.call('HSET', job, 'waiting_for', what)
      touch(job, ttl)
    elseif waiting_for then
      redis.call('HDEL', job, 'waiting_for')
    end
  end
end
return is_wanted
