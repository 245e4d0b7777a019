-- Stores the deployment that the node must run, unless the present deployment has priority.
--
-- KEYS: 1 deployment    poc:deployment, the one key without a TTL
--       2 hosts         poc:hosts
--       3 models        poc:models
-- ARGV: 1 wanted        the deployment, as JSON
--       2 by            'request'; or 'start' if a host starts with a --model
--       3 now           seconds since the epoch
--       4 token         of this call, by which a repeated call is recognized
--       5 host          id of the host that starts, or ''
--       6 name          served name of the model
--       7 kept_s        seconds for which hosts continue to load engines after a withdrawal
-- Returns {outcome, generation}. The outcome is 'ok' if the deployment was stored. For a request it may also be
-- 'deployed', because a model already runs or starts, or 'no_host'. For a start it may also be 'kept', because the
-- present deployment has priority.
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
-- If the same deployment is requested again, it continues with the engines that are still loading.
if by ~= 'request' or not engines or loading ~= wanted or now - asked_at > tonumber(kept_s) then
  engines = generation + 1
end
-- Forgets earlier models, so that requests for them get the error "not served here", not "try again later". Workers
-- that serve such a model report it again.
redis.call('DEL', models)
redis.call('DEL', deployment)
redis.call('HSET', deployment, 'generation', generation + 1, 'wanted', wanted, 'by', by, 'token', token, 'asked_at', now,
  'engines', engines)
note_event('deployment', name .. ' is deployed, by ' .. (by == 'start' and 'a start with --model.' or 'a request.'), name, now)
return {'ok', generation + 1}
