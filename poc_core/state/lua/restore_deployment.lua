-- Stores the deployment's record again, as a host remembers it, because Redis lost the record (FLUSHALL, or a restart
-- without its file). Does nothing if Redis has a newer record, or one that a later request has set.
--
-- KEYS: 1 deployment    poc:deployment, the one key without a TTL
-- ARGV: 1 generation    of the record that the host remembers
--       2 now           seconds since the epoch
--       3 host          name of the host
--       4 name          served name of the model, or '' for none
--       5... field, value, ... of that record's hash
-- Returns 1 if the host's record was restored, else 0.
local deployment = KEYS[1]
local generation, now, host, name = unpack(ARGV, 1, 4)
local first_field = 5
local found, by, restored_at, asked_at = unpack(redis.call('HMGET', deployment, 'generation', 'by', 'restored_at', 'asked_at'))
local known_at = 0
for at = first_field, #ARGV, 2 do
  if ARGV[at] == 'asked_at' then
    known_at = tonumber(ARGV[at + 1]) or 0
  end
end
-- If the record in Redis is older than the host's, Redis has restarted with an old file.
local is_older = (tonumber(asked_at) or known_at) < known_at
if found and (generation_of(found) >= generation_of(generation) or not (restored_at or by == 'start' or is_older)) then
  return 0
end
redis.call('DEL', deployment)
redis.call('HSET', deployment, 'generation', generation, 'restored_at', now, unpack(ARGV, first_field))
note_event('deployment', 'Redis lost its records, jobs and rounds among them. ' .. host .. ' knew the deployment: ' ..
  (name ~= '' and name .. ' goes on being served.' or 'nothing shall run.'), name, now)
return 1
