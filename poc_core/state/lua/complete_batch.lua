-- Stores a batch's values by nonce, in the order of the batch. A second completion changes nothing.
-- KEYS: 1 job. ARGV: 1 batch, 2 this second, 3 ttl, 4... the values as JSON texts.
-- Returns 1 when all batches of the job are done and it waits to be finished, else 0.
local job, n_values = KEYS[1], #ARGV - 3
if not is_active(redis.call('HGET', job, 'status')) then
  return 0
end
local text = redis.call('HGET', job .. ':nonces', ARGV[1])
if not text then
  return redis.error_reply('ERR the job has no batch ' .. ARGV[1])
end
local entries = {}
for nonce in string.gmatch(text, '%d+') do
  entries[#entries + 1] = nonce
  entries[#entries + 1] = ARGV[4 + (#entries - 1) / 2] or ''
end
if #entries ~= 2 * n_values then
  return redis.error_reply('ERR batch ' .. ARGV[1] .. ' has another number of nonces than the values given')
end
if redis.call('SREM', job .. ':todo', ARGV[1]) == 1 then
  for first = 1, #entries, CHUNK do
    redis.call('HSET', job .. ':values', unpack(entries, first, math.min(first + CHUNK - 1, #entries)))
  end
  redis.call('HDEL', job, 'waiting_for')
  redis.call('HDEL', job .. ':leases', ARGV[1])
  redis.call('HDEL', job .. ':attempts', ARGV[1])
  redis.call('HINCRBY', job, 'n_done', n_values)
  redis.call('DECRBY', 'poc:queued_nonces', n_values)
  count_processed(n_values, ARGV[2], ARGV[3])
  touch(job, ARGV[3])
end
return redis.call('SCARD', job .. ':todo') == 0 and 1 or 0
