-- Says once of outboxes that they are due: their next look is put off, in case that what is said is lost.
--
-- KEYS: 1 due      poc:outbox:due
--       2 courier  poc:courier, the sign of life of the couriers, who ask often, with what troubles them
-- ARGV: 1 now      seconds since the epoch
--       2 until_s  seconds since the epoch: when it may be said again
--       3 most     outboxes
--       4 known_s  seconds that a courier is remembered
--       5 trouble  '' or one of the words in outbox.py
-- Returns for each its id, url, head and bytes; '' for what it does not have. In place of the bytes of what is no hash
-- stands an error.
local due, courier = unpack(KEYS)
local now, until_s, most, known_s, trouble = unpack(ARGV)
redis.call('SET', courier, trouble, 'EX', known_s)
local found = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', due, '-inf', now, 'LIMIT', 0, most)) do
  redis.call('ZADD', due, until_s, id)
  local fields = redis.pcall('HMGET', 'poc:outbox:' .. id, 'url', 'head', 'bytes')
  local url, head, bytes = unpack(fields.err and {'', '', fields.err} or fields)
  for _, value in ipairs({id, url or '', head and '1' or '', bytes or '0'}) do
    found[#found + 1] = value
  end
end
return found
