-- The workers as their heartbeats said.
--
-- KEYS: 1 workers    the index of workers
-- ARGV: none
-- Returns {id, record, ...}; see worker_record.
local workers = KEYS[1]
local found = {}
for _, id in ipairs(redis.call('ZRANGE', workers, 0, -1)) do
  found[#found + 1] = id
  found[#found + 1] = worker_record(id)
end
return found
