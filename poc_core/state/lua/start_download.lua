-- Stores a download as running, unless it runs already or too many do.
--
-- KEYS: 1 downloads    hash: name -> JSON
--       2 running      set of names
-- ARGV: 1 name
--       2 download     as JSON
--       3 most         at a time
--       4 ttl          seconds that downloads are remembered
-- Returns ok, running or full.
local downloads, running = unpack(KEYS)
local name, download, most, ttl = unpack(ARGV)
if redis.call('SISMEMBER', running, name) == 1 then
  return 'running'
end
if redis.call('SCARD', running) >= tonumber(most) then
  return 'full'
end
redis.call('SADD', running, name)
redis.call('HSET', downloads, name, download)
redis.call('EXPIRE', downloads, ttl)
redis.call('EXPIRE', running, ttl)
return 'ok'
