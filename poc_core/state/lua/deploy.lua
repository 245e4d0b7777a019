-- Stores the deployment that the node shall run.
--
-- KEYS: 1 deployment    poc:deployment, the one key without a TTL
--       2 hosts         poc:hosts
--       3 models        poc:models
-- ARGV: 1 wanted        as JSON
--       2 by            'request', or 'start': a host that starts with a --model
--       3 now           seconds since the epoch
--       4 token         of this call, which may be repeated
--       5 host          that starts, or ''
--       6 name          served name of the model
--       7 kept_s        seconds for which hosts keep loading engines after a withdrawal
-- Returns the outcome and the generation. A request's outcome is 'ok', 'deployed' if a model runs or starts, or
-- 'no_host'; a start's is 'ok', or 'kept' if the present deployment has priority.
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
-- The same deployment again: it continues with the engines that load.
if by ~= 'request' or not engines or loading ~= wanted or now - asked_at > tonumber(kept_s) then
  engines = generation + 1
end
-- Earlier models are forgotten: a request for one is an error, not early. Workers that serve one report it again.
redis.call('DEL', models)
redis.call('DEL', deployment)
redis.call('HSET', deployment, 'generation', generation + 1, 'wanted', wanted, 'by', by, 'token', token, 'asked_at', now,
  'engines', engines)
note_event('deployment', name .. ' is deployed, by ' .. (by == 'start' and 'a start with --model.' or 'a request.'), name, now)
return {'ok', generation + 1}
