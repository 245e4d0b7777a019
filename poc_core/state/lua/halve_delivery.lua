-- Ends the delivery of a payload that was too large for its receiver. The payload's contents are sent in payloads of
-- half as many artifacts, with the next numbers. The number of the large payload is not used again.
--
-- KEYS: 1 outbox    its hash; its entries are this plus :entries
-- ARGV: 1 token     of the delivery that ends
--       2 why       error of the delivery
--       3 now       seconds since the epoch
--       4 ttl       seconds for which undelivered data is kept
--       5 first     first half of the payload's only entry, with its count; '' if the payload has several entries
--       6 second    second half of that entry, with its count; or ''
-- Returns 1. Returns 0, and changes nothing, if another process has the lock.
local outbox = KEYS[1]
local token, why, now, ttl, first, second = unpack(ARGV)
local entries = outbox .. ':entries'
if redis.call('HGET', outbox, 'token') ~= token then
  return 0
end
local artifacts = tonumber(redis.call('HGET', outbox, 'in_flight_artifacts'))
redis.call('HDEL', outbox, 'token', 'locked_until', 'in_flight', 'in_flight_artifacts')
redis.call('HSET', outbox, 'last_error', why, 'next_at', now, 'fits', math.max(1, math.floor(artifacts / 2)))
redis.call('HINCRBY', outbox, 'number', 1)
if first ~= '' then
  local bytes = #first + #second - #redis.call('LINDEX', entries, 0)
  redis.call('LSET', entries, 0, second)
  redis.call('LPUSH', entries, first)
  redis.call('HINCRBY', outbox, 'waiting', entry_count(first) + entry_count(second) - artifacts)
  redis.call('HINCRBY', outbox, 'bytes', bytes)
  if redis.call('HEXISTS', outbox, 'head') == 0 then
    count_job_bytes(bytes, ttl)
  end
end
due_outbox(string.sub(outbox, #'poc:outbox:' + 1), now, ttl)
return 1
