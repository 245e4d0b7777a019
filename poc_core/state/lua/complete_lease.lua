-- Takes the values of a lease into the outbox, once: a lease that another worker completed meanwhile is ignored.
-- KEYS: 1 round, 2 its outbox. ARGV: 1 round id, 2 first place, 3 places, 4 worker id, 5 excluded nonces (JSON list) or '',
-- 6 excluded, 7 now, 8 callback interval, 9 ttl, 10 entries kept for /status, or 0, 11... for each outbox entry the number of
-- values in it and the entry.
-- Returns 1 when taken, else 0.
local round, lease = KEYS[1], member(tonumber(ARGV[2]), tonumber(ARGV[3]))
if redis.call('HDEL', round .. ':leases', lease) == 0 and redis.call('ZREM', round .. ':free', lease) == 0 then
  return 0
end
local places, second = tonumber(ARGV[3]), string.format('%d', math.floor(tonumber(ARGV[7])))
redis.call('HINCRBY', round, 'n_processed', places)
redis.call('HINCRBY', round .. ':workers', ARGV[4], places)
redis.call('HINCRBY', round .. ':rate:' .. second, ARGV[4], places)
redis.call('EXPIRE', round .. ':workers', ARGV[9])
redis.call('EXPIRE', round .. ':rate:' .. second, 60)
if ARGV[5] ~= '' then
  redis.call('HINCRBY', round, 'n_excluded', ARGV[6])
  redis.call('RPUSH', round .. ':excluded', ARGV[5])
  redis.call('LTRIM', round .. ':excluded', -1000, -1)
  redis.call('EXPIRE', round .. ':excluded', ARGV[9])
end
count_processed(places, second, ARGV[9])
local has_receiver = redis.call('HEXISTS', KEYS[2], 'url') == 1
-- The last values of a round that is over come after it was closed; its receiver waits for them.
local due = redis.call('HEXISTS', KEYS[2], 'closed') == 1 and ARGV[7] or tonumber(ARGV[7]) + tonumber(ARGV[8])
for i = 11, #ARGV, 2 do
  redis.call('HINCRBY', round, 'n_valid', ARGV[i])
  if ARGV[10] ~= '0' then
    redis.call('RPUSH', round .. ':valid', ARGV[i + 1])
    redis.call('LTRIM', round .. ':valid', -tonumber(ARGV[10]), -1)
    redis.call('EXPIRE', round .. ':valid', ARGV[9])
  end
  if has_receiver then
    push_outbox(ARGV[1], ARGV[i + 1], ARGV[i], due, ARGV[9])
  end
end
return 1
