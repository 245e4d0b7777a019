-- Reads some of the reported nonces that are stored for /status.
--
-- KEYS: 1 round    its hash; its working keys are this plus a suffix
-- ARGV: 1 first    rank among all reported nonces, from 0, or '' for the newest
--       2 most     most nonces to return
-- Returns {rank of the first returned nonce, then an entry for each nonce}. This rank exceeds `first` if the nonce with
-- the rank `first` is no longer stored.
local round = KEYS[1]
local first, most = unpack(ARGV)
most = tonumber(most)
local kept = redis.call('LLEN', round .. ':valid')
local n_gone = tonumber(redis.call('HGET', round, 'n_valid') or '0') - kept
local from = math.max(0, first == '' and kept - most or tonumber(first) - n_gone)
local found = redis.call('LRANGE', round .. ':valid', string.format('%d', from), string.format('%d', from + most - 1))
table.insert(found, 1, string.format('%d', n_gone + from))
return found
