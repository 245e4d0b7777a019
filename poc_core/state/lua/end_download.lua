-- Stores that a download is done or failed. Does nothing if it was cancelled, even if the same repository is downloaded
-- again with another task id.
--
-- KEYS: 1 downloads    hash: name -> JSON
--       2 wanted       hash: name -> task id
-- ARGV: 1 name         repository@commit
--       2 task_id      of the download that ends
--       3 download     final record, as JSON
--       4 ttl          seconds for which downloads are remembered
-- Returns 1. Returns 0, and changes nothing, if the download was cancelled.
local downloads, wanted = unpack(KEYS)
local name, task_id, download, ttl = unpack(ARGV)
if redis.call('HGET', wanted, name) ~= task_id then
  return 0
end
redis.call('HDEL', wanted, name)
redis.call('HSET', downloads, name, download)
redis.call('EXPIRE', downloads, ttl)
return 1
