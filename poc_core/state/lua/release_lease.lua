-- Gives a worker's lease back uncomputed.
-- KEYS: 1 round. ARGV: 1 first place, 2 places, 3 worker id, 4 ttl. Returns 1 when it held the lease, else 0.
local lease = member(tonumber(ARGV[1]), tonumber(ARGV[2]))
local held = redis.call('HGET', KEYS[1] .. ':leases', lease)
if not held or string.match(held, '^(.*)|[^|]*$') ~= ARGV[3] then
  return 0
end
free_lease(KEYS[1], lease, ARGV[4])
return 1
