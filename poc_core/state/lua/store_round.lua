-- Stores a new round as the current round, unless the present current round is generating.
--
-- KEYS: 1 round         its hash
--       2 outbox        the hash of the round's outbox
--       3 current       poc:round:current
--       4 generating    the key of the id of the round that the model's workers compute
--       5 followed      poc:round:followed
-- ARGV: 1 round_id
--       2 state         IDLE, GENERATING or VALIDATING
--       3 config        as JSON
--       4 places        number of nonces in the round's nonce sequence
--       5 now           seconds since the epoch
--       6 ttl           seconds for which the round is kept
--       7 url           of the round's callbacks, or ''
--       8 head          fields that all payloads of the round share, as JSON
--       9 first_due     seconds since the epoch: when the first payload is due
-- Returns '' if the round was stored, else the id of the generating round.
local round, outbox, current, generating, followed = unpack(KEYS)
local round_id, state, config, places, now, ttl, url, head, first_due = unpack(ARGV)
local earlier_id = redis.call('GET', current)
if earlier_id == round_id then
  return '' -- a repeated call: the first call stored the round, but its answer was lost
end
if earlier_id then
  local earlier_state = redis.call('HGET', 'poc:round:' .. earlier_id, 'state')
  if earlier_state == 'GENERATING' then
    return earlier_id
  end
  if earlier_state == 'IDLE' or earlier_state == 'VALIDATING' then
    -- A stored or validating round ends when another starts.
    close_round('poc:round:' .. earlier_id, 'STOPPED', now, ttl)
  end
  redis.call('SADD', followed, earlier_id)
  redis.call('EXPIRE', followed, ttl)
end
redis.call('HSET', round, 'state', state, 'config', config, 'places', places, 'next', '0', 'created_at', now)
redis.call('SET', current, round_id, 'EX', ttl)
redis.call('LPUSH', 'poc:rounds:newest', round_id)
redis.call('LTRIM', 'poc:rounds:newest', 0, 49)
redis.call('EXPIRE', 'poc:rounds:newest', ttl)
note_event('round', 'Round ' .. short_id(round_id) .. ' begins as ' .. state .. '.', round_id, now)
redis.call('EXPIRE', round, ttl)
if url ~= '' then
  redis.call('HSET', outbox, 'url', url, 'head', head)
  redis.call('EXPIRE', outbox, ttl)
end
if state == 'GENERATING' then
  redis.call('HSET', round, 'started_at', now)
  due_first(round_id, first_due)
  redis.call('SET', generating, round_id, 'EX', ttl)
end
return ''
