-- Corrects the counters of queued nonces and of waiting callbacks' bytes, and removes expired jobs from the indexes.
--
-- KEYS: none
-- ARGV: 1 ttl    seconds for which the counters are kept
-- Returns the number of queued nonces.
local ttl = ARGV[1]
local queued = 0
for _, model in ipairs(redis.call('SMEMBERS', 'poc:jobs:models')) do
  local active = 'poc:jobs:active:' .. model
  for _, id in ipairs(redis.call('ZRANGE', active, 0, -1)) do
    local found = redis.pcall('HMGET', 'poc:job:' .. id, 'status', 'n_total', 'n_done')
    local status, n_total, n_done = unpack(found) -- nothing where the record cannot be read
    if is_active(status) then
      queued = queued + (tonumber(n_total) or 0) - (tonumber(n_done) or 0)
    else
      redis.call('ZREM', active, id)
    end
  end
  if redis.call('EXISTS', active) == 0 then
    redis.call('SREM', 'poc:jobs:models', model)
  end
end
local bytes = 0
for _, id in ipairs(redis.call('HKEYS', 'poc:outbox:of_jobs')) do
  local waiting = redis.call('HGET', 'poc:outbox:' .. id, 'bytes')
  if waiting then
    bytes = bytes + tonumber(waiting)
  elseif not is_active(redis.pcall('HGET', 'poc:job:' .. id, 'status')) then
    redis.call('HDEL', 'poc:outbox:of_jobs', id)
  end
end
redis.call('SET', 'poc:outbox:job_bytes', string.format('%d', bytes), 'EX', ttl)
redis.call('SET', 'poc:queued_nonces', string.format('%d', queued), 'EX', ttl)
return queued
