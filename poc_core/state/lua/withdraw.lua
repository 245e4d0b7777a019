-- Withdraws the deployment, so that the node runs no model. A repeated call changes nothing.
--
-- KEYS: 1 deployment    poc:deployment, the one key without a TTL
--       2 models        poc:models
-- ARGV: 1 now           seconds since the epoch
--       2 keeps         1: hosts continue to load engines for a while; 0: engines stop at once
-- Returns the deployment's generation.
local deployment, models = unpack(KEYS)
local now, keeps = unpack(ARGV)
local wanted, generation, engines, loading, settled_at, error =
  unpack(redis.call('HMGET', deployment, 'wanted', 'generation', 'engines', 'loading', 'settled_at', 'error'))
generation = generation_of(generation)
if wanted == '' and not (engines and keeps == '0') then
  return generation
end
-- Forgets all models, so that requests for any model get the error "try again later", not "not served here".
redis.call('DEL', models)
redis.call('DEL', deployment)
redis.call('HSET', deployment, 'generation', generation + 1, 'wanted', '', 'by', 'request', 'asked_at', now)
if wanted == '' then
  redis.call('HSET', deployment, 'loading', loading)
  return generation + 1
end
if wanted and not (settled_at or error) then
  redis.call('HSET', deployment, 'loading', wanted)
  if keeps == '1' then
    redis.call('HSET', deployment, 'engines', engines or generation)
  end
end
note_event('deployment', 'The model is taken down: nothing shall run.', '', now)
return generation + 1
