-- Deletes earlier rounds that have an empty outbox and no leases. Otherwise many rounds could fill Redis.
--
-- KEYS: 1 followed    poc:round:followed
-- ARGV: 1 now         seconds since the epoch
-- Returns the number of deleted rounds.
local followed = KEYS[1]
local now = ARGV[1]
now = tonumber(now)

local function is_over(id)
  local round = 'poc:round:' .. id
  free_lost(round)
  return redis.call('HLEN', round .. ':leases') == 0 and redis.call('LLEN', 'poc:outbox:' .. id .. ':entries') == 0
end

local n_forgotten = 0
for _, id in ipairs(redis.call('SMEMBERS', followed)) do
  if is_over(id) then
    local round = 'poc:round:' .. id
    local gone = {round, 'poc:outbox:' .. id}
    for _, suffix in ipairs({':leases', ':free', ':workers', ':counted', ':excluded', ':valid'}) do
      gone[#gone + 1] = round .. suffix
    end
    for age = 0, 61 do -- older keys expire by themselves
      gone[#gone + 1] = string.format('%s:pace:%d', round, math.floor(now / 60) - age)
      gone[#gone + 1] = string.format('%s:rate:%d', round, math.floor(now) - age)
    end
    redis.call('UNLINK', unpack(gone))
    redis.call('SREM', followed, id)
    n_forgotten = n_forgotten + 1
  end
end
return n_forgotten
