-- Says that the node shall run nothing. Repeated, it changes nothing.
--
-- KEYS: 1 deployment    poc:deployment, the one key without a TTL
-- ARGV: 1 now           seconds since the epoch
-- Returns the generation.
local deployment = KEYS[1]
local now = ARGV[1]
local wanted, generation = unpack(redis.call('HMGET', deployment, 'wanted', 'generation'))
generation = generation_of(generation)
if wanted == '' then
  return generation
end
redis.call('DEL', deployment)
redis.call('HSET', deployment, 'generation', generation + 1, 'wanted', '', 'by', 'request', 'asked_at', now)
note_event('deployment', 'The model is taken down: nothing shall run.', '', now)
return generation + 1
