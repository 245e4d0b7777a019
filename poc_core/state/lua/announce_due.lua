-- Returns the due outboxes, and stores a sign of life of the couriers. An outbox that stays due is returned again at
-- until_s, in case this answer is lost.
--
-- KEYS: 1 due      poc:outbox:due
--       2 courier  poc:courier, the couriers' sign of life; its value is the trouble that a courier reported
-- ARGV: 1 now      seconds since the epoch
--       2 until_s  seconds since the epoch: when these outboxes are returned again
--       3 most     most outboxes to return
--       4 known_s  seconds that a courier is remembered
--       5 trouble  '' or a constant of outbox.py
-- Returns the id, url, '1' if there is a head, and waiting bytes of each outbox; '' for a missing url or head. If the
-- outbox's key is not a hash, the bytes are an error's text.
local due, courier = unpack(KEYS)
local now, until_s, most, known_s, trouble = unpack(ARGV)
write_even_if_full(due)
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
