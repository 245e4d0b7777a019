-- Puts the counter of waiting nonces right and drops jobs that expired from the indexes.
--
-- KEYS: none
-- ARGV: 1 ttl    seconds the counter is kept
-- Returns how many nonces wait.
local ttl = ARGV[1]
local queued = 0
for _, model in ipairs(redis.call('SMEMBERS', 'poc:jobs:models')) do
  local active = 'poc:jobs:active:' .. model
  for _, id in ipairs(redis.call('ZRANGE', active, 0, -1)) do
    local status, n_total, n_done = unpack(redis.call('HMGET', 'poc:job:' .. id, 'status', 'n_total', 'n_done'))
    if is_active(status) then
      queued = queued + tonumber(n_total) - tonumber(n_done)
    else
      redis.call('ZREM', active, id)
    end
  end
  if redis.call('EXISTS', active) == 0 then
    redis.call('SREM', 'poc:jobs:models', model)
  end
end
redis.call('SET', 'poc:queued_nonces', string.format('%d', queued), 'EX', ttl)
return queued
