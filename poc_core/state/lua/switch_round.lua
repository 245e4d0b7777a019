-- Sets a round's state. From STOPPED there is no way back.
-- KEYS: 1 round, 2 the generating key of its model. ARGV: 1 round id, 2 new state, 3 now, 4 ttl, 5 error or ''.
-- Returns the state it had; the round changed unless that was STOPPED or ''.
local before = redis.call('HGET', KEYS[1], 'state')
if not before or before == 'STOPPED' then
  return before or ''
end
if ARGV[5] ~= '' then
  redis.call('HSET', KEYS[1], 'error', ARGV[5])
end
if ARGV[2] == 'STOPPED' then
  close_round(KEYS[1], ARGV[2], ARGV[3], ARGV[4])
else
  redis.call('HSET', KEYS[1], 'state', ARGV[2])
end
if ARGV[2] == 'GENERATING' then
  redis.call('HSETNX', KEYS[1], 'started_at', ARGV[3])
  redis.call('SET', KEYS[2], ARGV[1], 'EX', ARGV[4])
elseif redis.call('GET', KEYS[2]) == ARGV[1] then
  redis.call('DEL', KEYS[2])
end
return before
