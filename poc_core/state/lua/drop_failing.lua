-- Deletes the callbacks of jobs that their receivers do not accept.
--
-- KEYS: 1 places   poc:outbox:of_jobs
-- ARGV: 1 now      seconds since the epoch
--       2 ttl      seconds for which counters are kept
--       3 tries    failed tries in a row after which a callback is deleted
-- Returns the number of deleted callbacks.
local places = KEYS[1]
local now, ttl, tries = unpack(ARGV)
local n = 0
local found = redis.call('HGETALL', places)
for i = 1, #found, 2 do
  if is_failing(found[i], found[i + 1], tonumber(tries)) then
    drop_callback(found[i], 'its receiver does not take it, and the node was stopped.', now, ttl)
    n = n + 1
  end
end
return n
