-- Reads the workers' records from their heartbeats.
--
-- KEYS: 1 workers    the index of workers
-- ARGV: 1 ttl_ms     largest TTL of a worker's record, in milliseconds
-- Returns {id, record, ...}. The record is '' if the worker is dead (worker_record).
local workers, ttl_ms = KEYS[1], tonumber(ARGV[1])
local found = {}
for _, id in ipairs(redis.call('ZRANGE', workers, 0, -1)) do
  found[#found + 1] = id
  found[#found + 1] = worker_record(id)
  local left_ms = redis.call('PTTL', 'poc:worker:' .. id)
  if left_ms == -1 or left_ms > ttl_ms then -- no worker may live longer without a sign of life
    redis.pcall('PEXPIRE', 'poc:worker:' .. id, ttl_ms)
  end
end
return found
