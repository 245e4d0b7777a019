-- Changes a round's state, unless the round is STOPPED, which is final.
--
-- KEYS: 1 round         its hash
--       2 generating    the key of the id of the round that the model's workers compute
-- ARGV: 1 round_id
--       2 state         the new state
--       3 now           seconds since the epoch
--       4 ttl           seconds for which the round is kept
--       5 why           reason why the round stopped by itself, or ''
--       6 first_due     seconds since the epoch: when the first payload is due
-- Returns the previous state; '' if the round has expired. Nothing changed if this is STOPPED or ''.
local round, generating = unpack(KEYS)
local round_id, state, now, ttl, why, first_due = unpack(ARGV)
local before = redis.call('HGET', round, 'state')
if not before or before == 'STOPPED' then
  return before or ''
end
if why ~= '' then
  redis.call('HSET', round, 'error', why)
end
if state == 'STOPPED' then
  close_round(round, state, now, ttl)
else
  redis.call('HSET', round, 'state', state)
  spread_counts(round, ttl)
  keep_round(round_id, generating, ttl)
end
if state == 'GENERATING' then
  redis.call('HSETNX', round, 'started_at', now)
  due_first(round_id, first_due)
  redis.call('SET', generating, round_id, 'EX', ttl)
elseif redis.call('GET', generating) == round_id then
  redis.call('DEL', generating)
end
if before ~= state then
  local told = 'Round ' .. short_id(round_id) .. ' goes from ' .. before .. ' to ' .. state
  note_event('round', told .. (why ~= '' and ': ' .. why or '.'), round_id, now)
end
return before
