-- A receiver did not answer: from the `breaks_at`-th time in a row on it is tried by one payload of jobs at a time.
--
-- KEYS: 1 receiver     what is known of it
--       2 receivers    those that did not answer
-- ARGV: 1 name         of the receiver
--       2 now          seconds since the epoch
--       3 breaks_at    tries in a row
--       4 first_s      seconds until the next try, which double from one to the next
--       5 last_s       at most
--       6 jitter       by which they are multiplied
--       7 ttl          seconds that it is remembered
-- Returns the tries in a row.
local receiver, receivers = unpack(KEYS)
local name, now, breaks_at, first_s, last_s, jitter, ttl = unpack(ARGV)
local failures = redis.call('HINCRBY', receiver, 'failures', 1)
local doublings = math.min(10, math.max(0, failures - tonumber(breaks_at)))
local wait_s = math.min(tonumber(last_s), 2 * tonumber(first_s) * 2 ^ doublings) * tonumber(jitter)
redis.call('HSET', receiver, 'next_at', string.format('%.3f', tonumber(now) + wait_s))
redis.call('EXPIRE', receiver, ttl)
redis.call('ZADD', receivers, now, name)
redis.call('ZREMRANGEBYSCORE', receivers, '-inf', string.format('%.3f', tonumber(now) - tonumber(ttl)))
redis.call('EXPIRE', receivers, ttl)
return failures
