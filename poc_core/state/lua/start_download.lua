-- Stores a download, unless the same download is active or all slots are taken. A slot is free again when its download
-- has ended or was cancelled, and the download's process has ended.
--
-- KEYS: 1 downloads    hash: name -> JSON
--       2 wanted       hash of the active downloads: name -> task id
--       3 slots        set of task ids that take a slot
-- ARGV: 1 name         repository@commit
--       2 task_id      id of the new download
--       3 download     its record, as JSON
--       4 most         number of slots: most simultaneous downloads
--       5 starts_s     most seconds until the first sign of life of the download's process
--       6 ttl          seconds for which downloads are remembered
-- Returns 'ok', 'running' if the same download is active, or 'full' if all slots are taken.
local downloads, wanted, slots = unpack(KEYS)
local name, task_id, download, most, starts_s, ttl = unpack(ARGV)
local known = redis.call('HGET', wanted, name)
if known then
  return known == task_id and 'ok' or 'running' -- 'ok': a repeated call, whose first answer was lost
end
local is_wanted = {}
for _, task in ipairs(redis.call('HVALS', wanted)) do
  is_wanted[task] = true
end
for _, task in ipairs(redis.call('SMEMBERS', slots)) do
  if not is_wanted[task] and redis.call('EXISTS', 'poc:download:' .. task) == 0 then
    redis.call('SREM', slots, task)
  end
end
if redis.call('SCARD', slots) >= tonumber(most) then
  return 'full'
end
redis.call('SADD', slots, task_id)
redis.call('SET', 'poc:download:' .. task_id, '1', 'EX', starts_s)
redis.call('HSET', wanted, name, task_id)
redis.call('HSET', downloads, name, download)
for _, key in ipairs(KEYS) do
  redis.call('EXPIRE', key, ttl)
end
return 'ok'
