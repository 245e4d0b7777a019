-- Stores a download as wanted, unless it is active or all slots are taken. A slot is free again once its download is
-- unwanted and its process has ended.
--
-- KEYS: 1 downloads    hash: name -> JSON
--       2 wanted       hash: name -> task id
--       3 slots        set of task ids
-- ARGV: 1 name
--       2 task_id
--       3 download     as JSON
--       4 most         simultaneous downloads
--       5 starts_s     seconds until the process' first sign of life
--       6 ttl          seconds that downloads are remembered
-- Returns ok, running or full.
local downloads, wanted, slots = unpack(KEYS)
local name, task_id, download, most, starts_s, ttl = unpack(ARGV)
if redis.call('HEXISTS', wanted, name) == 1 then
  return 'running'
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
