-- Announces due outboxes. Each is announced again at until_s, in case the announcement is lost.
--
-- KEYS: 1 due      poc:outbox:due
--       2 courier  poc:courier, the couriers' sign of life; its value is their trouble
-- ARGV: 1 now      seconds since the epoch
--       2 until_s  seconds since the epoch: next announcement
--       3 most     outboxes
--       4 known_s  seconds that a courier is remembered
--       5 trouble  '' or a constant of outbox.py
-- Returns the id, url, head and bytes of each outbox, '' for a missing field, and an error as the bytes of a key that
-- is no hash.
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
