-- Counts a try that a receiver did not answer. After breaks_at such tries in a row, the receiver gets only one payload
-- of jobs at a time, as a probe (take_delivery.lua).
--
-- KEYS: 1 receiver     its hash
--       2 receivers    the index of silent receivers
-- ARGV: 1 name         of the receiver: host:port
--       2 now          seconds since the epoch
--       3 breaks_at    unanswered tries in a row
--       4 ttl          seconds for which the receiver is remembered
--       5...           seconds until the next try after breaks_at tries, after one more try, and so on; the last value
--                      holds for all further tries
-- Returns the number of unanswered tries in a row.
local receiver, receivers = unpack(KEYS)
local name, now, breaks_at, ttl = unpack(ARGV, 1, 4)
local first_wait = 5
write_even_if_full(receiver)
local failures = redis.call('HINCRBY', receiver, 'failures', 1)
local wait_s = tonumber(ARGV[math.min(#ARGV, first_wait + math.max(0, failures - tonumber(breaks_at)))])
redis.call('HSET', receiver, 'next_at', string.format('%.3f', tonumber(now) + wait_s))
redis.call('EXPIRE', receiver, ttl)
redis.call('ZADD', receivers, now, name)
redis.call('ZREMRANGEBYSCORE', receivers, '-inf', string.format('%.3f', tonumber(now) - tonumber(ttl)))
redis.call('EXPIRE', receivers, ttl)
if failures == tonumber(breaks_at) then
  note_event('receiver', name .. ' does not answer: ' .. breaks_at .. ' tries in a row.', name, now)
end
return failures
