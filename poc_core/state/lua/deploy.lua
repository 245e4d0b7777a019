-- Says what the node shall run from now on.
--
-- KEYS: 1 deployment    poc:deployment, the one key without a TTL
--       2 hosts         poc:hosts
--       3 models        poc:models
-- ARGV: 1 wanted        as JSON
--       2 by            'request', or 'start': a host that begins with a --model of its own
--       3 now           seconds since the epoch
--       4 token         of this call, which may be repeated
--       5 host          that begins, or ''
--       6 name          what clients call the model
--       7 kept_s        seconds for which hosts keep engines that were loading when they were withdrawn
-- Returns what came of it and the generation: 'ok'; of a request 'deployed' while something runs or starts, and
-- 'no_host'; of a start 'kept' where what is there counts more.
local deployment, hosts, models = unpack(KEYS)
local wanted, by, now, token, host, name, kept_s = unpack(ARGV)
local before, before_by, error, before_token, generation, loading, engines, asked_at =
  unpack(redis.call('HMGET', deployment, 'wanted', 'by', 'error', 'token', 'generation', 'loading', 'engines', 'asked_at'))
generation = generation_of(generation)
if before_token == token then
  return {'ok', generation} -- the first answer was lost
end
local is_active = before and before ~= '' and not error
local others = false
for _, one in ipairs(live_hosts(hosts)) do
  others = others or one.id ~= host
end
if by == 'request' then
  if not others then
    return {'no_host', generation}
  end
  if is_active then
    return {'deployed', generation}
  end
elseif before and (others or (is_active and (before_by == 'request' or before == wanted))) then
  return {'kept', generation}
end
-- The very same again: it goes on with the engines that load.
if by ~= 'request' or not engines or loading ~= wanted or now - asked_at > tonumber(kept_s) then
  engines = generation + 1
end
-- What was served is not known any more: a request for it is wrong, not early. Workers that serve it tell so again.
redis.call('DEL', models)
redis.call('DEL', deployment)
redis.call('HSET', deployment, 'generation', generation + 1, 'wanted', wanted, 'by', by, 'token', token, 'asked_at', now,
  'engines', engines)
note_event('deployment', name .. ' is deployed, by ' .. (by == 'start' and 'a start with --model.' or 'a request.'), name, now)
return {'ok', generation + 1}
