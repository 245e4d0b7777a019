-- Stores what some jobs wait for. The caller is a worker that has leased batches of these jobs, or would lease some.
--
-- KEYS: the hashes of the jobs; the working keys of a job are its hash's key plus a suffix
-- ARGV: 1 what    what the jobs wait for, or '' if they continue
--       2 ttl     seconds for which a job is kept without progress
-- Returns 1 if at least one of the jobs can be computed, else 0. An active job can be computed, except if it waits
-- while a round uses the workers.
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
