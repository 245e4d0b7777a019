-- Turns staged nonces (and claimed vectors) into a queued job, unless too many nonces would wait.
-- KEYS: 1 job. ARGV: 1 job id, 2 model, 3 n_total, 4 n_batches, 5 most nonces that may wait, 6 now, 7 ttl, 8... field, value, ...
-- Returns -1 when stored (or already stored: a repeated call), else how many nonces wait.
local job, n_total, n_batches = KEYS[1], tonumber(ARGV[3]), tonumber(ARGV[4])
if redis.call('EXISTS', job) == 1 then
  return -1
end
local queued = tonumber(redis.call('GET', 'poc:queued_nonces') or '0')
if queued < 0 then
  queued = 0
  redis.call('SET', 'poc:queued_nonces', '0')
end
if queued + n_total > tonumber(ARGV[5]) then
  redis.call('UNLINK', job .. ':nonces', job .. ':claimed')
  return queued
end
if redis.call('HLEN', job .. ':nonces') ~= n_batches then
  return redis.error_reply('ERR the staged nonces are gone; send the request again')
end
redis.call('HSET', job, unpack(ARGV, 8))
for first = 0, n_batches - 1, CHUNK do
  local indexes = {}
  for index = first, math.min(first + CHUNK, n_batches) - 1 do
    indexes[#indexes + 1] = string.format('%d', index)
  end
  redis.call('SADD', job .. ':todo', unpack(indexes))
end
redis.call('INCRBY', 'poc:queued_nonces', ARGV[3])
redis.call('ZADD', 'poc:jobs:active:' .. ARGV[2], ARGV[6], ARGV[1])
redis.call('SADD', 'poc:jobs:models', ARGV[2])
touch(job, ARGV[7])
return -1
