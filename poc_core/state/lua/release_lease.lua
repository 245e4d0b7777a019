-- Gives a worker's lease back uncomputed.
--
-- KEYS: 1 round     its hash; its working keys are this plus a suffix
-- ARGV: 1 first     place of the lease in the round's nonce sequence
--       2 places    of the lease
--       3 worker    who held it
--       4 ttl       seconds the round is kept
-- Returns 1 when it held the lease, else 0.
local round = KEYS[1]
local first, places, worker, ttl = unpack(ARGV)
local lease = member(tonumber(first), tonumber(places))
local held = redis.call('HGET', round .. ':leases', lease)
if not held or string.match(held, '^(.*)|[^|]*$') ~= worker then
  return 0
end
free_lease(round, lease, ttl)
return 1
