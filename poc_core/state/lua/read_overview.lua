-- Reads the node's state in one atomic step, for the many clients of /status.
--
-- KEYS: 1 current          poc:round:current, the id of the latest round
--       2 workers          the index of workers
--       3 receivers        the index of receivers that did not answer
--       4 outboxes_due     the index of outboxes
--       5 queued           the counter of queued nonces
--       6 total            the counter of computed nonces
--       7 deployment       the hash of the deployment
--       8 hosts            the index of hosts
--       9 courier          the couriers' sign of life, which expires a day after it was last stored
-- ARGV: 1 second           the current second since the epoch
--       2 window           number of seconds before that second over which rates are averaged
--       3 most_receivers   most receivers to read; those that were silent last come first
--       4...               names of the fields to read from the round's hash
-- Returns {queued nonces, waiting callbacks, computed nonces, nonces by worker within the window, workers, receivers,
-- round, deployment, hosts, TTL of the couriers' sign of life, the problem that a courier reported or ''}, where
--   each worker     is {id, record as JSON or '' if the worker is dead, TTL}
--   each receiver   is {name, failures, next_at}
--   each host       is {id, when it last reported, report as JSON or '', TTL}
--   round           is {} if there is none, else {id, values of the fields, nonces by worker, nonces by worker within the
--                   window, hash of its outbox, excluded nonces}
--   deployment      is a hash; hashes are {field, value, ...}
-- Nonces by worker are one JSON object, because Redis' clients would read thousands of separate values slowly. TTLs are
-- in milliseconds; below 0 there is no TTL.
local current, workers, receivers, outboxes_due, queued, total, deployment, hosts, courier = unpack(KEYS)
local second, window, most_receivers = unpack(ARGV, 1, 3)
local first_field = 4

-- Calls `look` with each second of the window, as a text for a key.
local function each_second(look)
  for age = 1, math.min(tonumber(window), 60) do -- the counters of a second live as long
    look(string.format('%d', tonumber(second) - age))
  end
end

local function add(sums, counts)
  for i = 1, #counts, 2 do
    sums[counts[i]] = (sums[counts[i]] or 0) + tonumber(counts[i + 1])
  end
end

local function as_json(sums)
  return next(sums) and cjson.encode(sums) or '{}'
end

-- The current round's latest counts, which spread_counts has not moved yet: by second, and in total.
local id = redis.call('GET', current)
local fresh, fresh_totals, n_fresh = {}, {}, 0
local counts = id and redis.call('HGETALL', 'poc:round:' .. id .. ':counted') or {}
for i = 1, #counts, 2 do
  local at, worker = string.match(counts[i], '^(%d+)|(.*)$')
  if at then
    fresh[at] = fresh[at] or {}
    for _, found in ipairs({fresh[at], fresh_totals}) do
      found[#found + 1], found[#found + 2] = worker, counts[i + 1]
    end
    n_fresh = n_fresh + counts[i + 1]
  end
end

-- Returns the nonces by worker within the window, as JSON. `key`: prefix of the keys of the counts of each second.
local function counts_lately(key)
  local sums = {}
  each_second(function(at)
    add(sums, redis.call('HGETALL', key .. at))
    add(sums, fresh[at] or {})
  end)
  return as_json(sums)
end

local function read_round()
  local round, totals = 'poc:round:' .. id, {}
  add(totals, redis.call('HGETALL', round .. ':workers'))
  add(totals, fresh_totals)
  return {id, redis.call('HMGET', round, unpack(ARGV, first_field)), as_json(totals), counts_lately(round .. ':rate:'),
    redis.call('HGETALL', 'poc:outbox:' .. id), redis.call('LRANGE', round .. ':excluded', 0, -1)}
end

-- Returns 1 if the current round is over, its outbox is empty, and a living worker still computes for it; else 0.
local function n_in_hand()
  local round, outbox = 'poc:round:' .. id, 'poc:outbox:' .. id
  if redis.call('HGET', round, 'state') == 'GENERATING' or redis.call('HEXISTS', outbox, 'url') == 0
    or redis.call('LLEN', outbox .. ':entries') > 0 then
    return 0
  end
  for _, lease in ipairs(redis.call('HVALS', round .. ':leases')) do
    if lease_state(lease) == 'held' then
      return 1
    end
  end
  return 0
end

local records = {}
for i, id in ipairs(redis.call('ZRANGE', workers, 0, -1)) do
  records[i] = {id, worker_record(id), redis.call('PTTL', 'poc:worker:' .. id)}
end
local silent = {}
for i, name in ipairs(redis.call('ZREVRANGE', receivers, 0, string.format('%d', most_receivers - 1))) do
  local failures, next_at = unpack(redis.call('HMGET', 'poc:receiver:' .. name, 'failures', 'next_at'))
  silent[i] = {name, failures, next_at}
end
local reports, scored = {}, redis.call('ZRANGE', hosts, 0, -1, 'WITHSCORES')
for i = 1, #scored, 2 do
  local key = 'poc:host:' .. scored[i]
  local report = redis.pcall('HGET', key, 'report')
  reports[#reports + 1] = {scored[i], scored[i + 1], report and not report.err and report or '', redis.call('PTTL', key)}
end
local wanted, trouble = redis.pcall('HGETALL', deployment), redis.pcall('GET', courier)
local counted = (tonumber(redis.call('GET', total)) or 0) + n_fresh
local n_waiting = redis.call('ZCARD', outboxes_due) + (id and n_in_hand() or 0)
return {redis.call('GET', queued) or '0', n_waiting, string.format('%d', counted),
  counts_lately('poc:stats:by:'), records, silent, id and read_round() or {},
  wanted.err and {'', ''} or wanted, reports, redis.call('PTTL', courier),
  type(trouble) == 'string' and trouble or ''}
