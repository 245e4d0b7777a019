-- Makes a round the current one, unless one is generating.
-- KEYS: 1 round, 2 its outbox, 3 poc:round:current, 4 the generating key of its model.
-- ARGV: 1 round id, 2 state, 3 config, 4 places of the sequence, 5 now, 6 ttl, 7 url or '', 8 head of its payloads.
-- Returns '' when stored, else the id of the round that generates.
local current = redis.call('GET', KEYS[3])
if current == ARGV[1] then
  return '' -- this call is repeated, its first answer was lost
end
if current then
  local state = redis.call('HGET', 'poc:round:' .. current, 'state')
  if state == 'GENERATING' then
    return current
  end
  if state == 'IDLE' or state == 'VALIDATING' then
    -- A round that was only stored, or validates, ends where another begins.
    close_round('poc:round:' .. current, 'STOPPED', ARGV[5], ARGV[6])
  end
end
redis.call('HSET', KEYS[1], 'state', ARGV[2], 'config', ARGV[3], 'places', ARGV[4], 'next', '0', 'created_at', ARGV[5])
redis.call('SET', KEYS[3], ARGV[1], 'EX', ARGV[6])
redis.call('EXPIRE', KEYS[1], ARGV[6])
if ARGV[7] ~= '' then
  redis.call('HSET', KEYS[2], 'url', ARGV[7], 'head', ARGV[8])
  redis.call('EXPIRE', KEYS[2], ARGV[6])
end
if ARGV[2] == 'GENERATING' then
  redis.call('HSET', KEYS[1], 'started_at', ARGV[5])
  redis.call('SET', KEYS[4], ARGV[1], 'EX', ARGV[6])
end
return ''
