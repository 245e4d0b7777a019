-- Stores a host's report. If all live hosts have failed with the current deployment, the deployment fails.
--
-- KEYS: 1 deployment    poc:deployment
--       2 hosts         poc:hosts
--       3 host          poc:host:{id}, its hash
-- ARGV: 1 id            of the host
--       2 generation    of the deployment that it follows
--       3 state         IDLE, STOPPING, STARTING, SERVING or FAILED
--       4 error         reason of a failure, or ''
--       5 report        the complete report, as JSON
--       6 now           seconds since the epoch
--       7 ttl           seconds without a report after which a host counts as gone
--       8 index_ttl     seconds for which the index of hosts is kept
--       9 model         served name of the host's model, or ''
--      10 engine        HOST:PORT of its engine's head if the engine spans hosts, or ''
-- Returns nothing.
local HOST_KNOWN_S = 3600 -- seconds for which a host that is gone is reported as missing
local deployment, hosts, host = unpack(KEYS)
local id, generation, state, error, report, now, ttl, index_ttl, model, engine = unpack(ARGV)
redis.call('HSET', host, 'generation', generation, 'state', state, 'report', report, 'engine', engine)
redis.call('EXPIRE', host, ttl)
redis.call('ZADD', hosts, now, id)
redis.call('ZREMRANGEBYSCORE', hosts, '-inf', now - HOST_KNOWN_S)
redis.call('ZREMRANGEBYSCORE', hosts, now + HOST_KNOWN_S, '+inf')
redis.call('EXPIRE', hosts, index_ttl)
local current, wanted, by = unpack(redis.call('HMGET', deployment, 'generation', 'wanted', 'by'))
if current ~= generation or not wanted or wanted == '' then
  return
end
if state == 'SERVING' then
  if redis.call('HSETNX', deployment, 'settled_at', now) == 1 then
    local took = tonumber(now) - tonumber(redis.call('HGET', deployment, 'asked_at') or now)
    note_event('deployment', string.format('%s serves, %.0f s after it was asked for.', model, took), model, now)
  end
elseif state == 'FAILED' then
  local living, lost = live_hosts(hosts), {}
  for _, other in ipairs(living) do
    -- If one host of an engine fails, the engine's other hosts wait for that host, so they count as failed too. They do
    -- not after a start with --model, because then the failed host is started again.
    if by == 'request' and other.engine ~= '' and other.generation == current and other.state == 'FAILED' then
      lost[other.engine] = true
    end
  end
  for _, other in ipairs(living) do
    if other.generation ~= current or not (other.state == 'FAILED' or lost[other.engine]) then
      return
    end
  end
  if redis.call('HSETNX', deployment, 'error', error) == 1 then
    redis.call('HSET', deployment, 'settled_at', now)
    note_event('deployment', model .. ' cannot be served: ' .. shortened(error), model, now)
  end
end
