-- Some of the reported nonces that are kept for /status.
--
-- KEYS: 1 round    its hash; its working keys are this plus a suffix
-- ARGV: 1 first    place among all that the round reported, counted from 0, or '' for the newest
--       2 most     nonces
-- Returns {place of the first one, then each as an entry}; it may lie behind `first`, for of very many the last are kept.
local round = KEYS[1]
local first, most = unpack(ARGV)
most = tonumber(most)
local kept = redis.call('LLEN', round .. ':valid')
local n_gone = tonumber(redis.call('HGET', round, 'n_valid') or '0') - kept
local from = math.max(0, first == '' and kept - most or tonumber(first) - n_gone)
local found = redis.call('LRANGE', round .. ':valid', string.format('%d', from), string.format('%d', from + most - 1))
table.insert(found, 1, string.format('%d', n_gone + from))
return found
