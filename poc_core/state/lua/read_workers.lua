-- Reads the workers' records from their heartbeats.
--
-- KEYS: 1 workers    the index of workers
-- ARGV: 1 ttl_ms     longest life without a sign of life
-- Returns {id, record, ...}; see worker_record.
local workers, ttl_ms = KEYS[1], tonumber(ARGV[1])
local found = {}
for _, id in ipairs(redis.call('ZRANGE', workers, 0, -1)) do
  found[#found + 1] = id
  found[#found + 1] = worker_record(id)
  local left_ms = redis.call('PTTL', 'poc:worker:' .. id)
  if left_ms == -1 or left_ms > ttl_ms then -- a worker may not live longer without a sign of life
    redis.pcall('PEXPIRE', 'poc:worker:' .. id, ttl_ms)
  end
end
return found
