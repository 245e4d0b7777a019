-- Reads the node's state in one atomic step, for the many clients of /status.
--
-- KEYS: 1 current          poc:round:current, the id of the latest round
--       2 workers          the index of workers
--       3 receivers        the index of receivers that did not answer
--       4 outboxes_due     the index of outboxes
--       5 queued           the counter of nonces that wait
--       6 total            the counter of nonces computed
--       7 deployment       the hash of the deployment
--       8 hosts            the index of hosts
--       9 courier          expires a day after the last sign of life of a courier
-- ARGV: 1 second           since the epoch, the one under way
--       2 window           seconds before it over which rates are averaged
--       3 most_receivers   receivers to look at, the latest silent first
--       4... fields      of a round's hash
-- Returns {queued, callbacks waiting, nonces computed, nonces by worker within the window, workers, receivers, round,
-- deployment, hosts, courier, its problem}. Each worker is {id, its record, left}, each receiver {name, failures, next_at}, each host
-- {id, when it last reported, its report or '', left}; round is {} where there is none, else {id, the values of its fields,
-- nonces by worker, the same within the window, its outbox's hash, excluded nonces}; deployment is a hash. Hashes are
-- {field, value, ...}; a worker's record is a JSON object, '' of a dead one, and so are nonces by worker: of many workers
-- Redis' clients would read many thousand answers. `left`, and for the courier: milliseconds that the key lives without
-- another sign of life; below 0 there is none.
local current, workers, receivers, outboxes_due, queued, total, deployment, hosts, courier = unpack(KEYS)
local second, window, most_receivers = unpack(ARGV, 1, 3)
local first_field = 4

-- Calls `look` with each whole second of the window, as it is written in keys.
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

-- Counts of the current round that are not yet spread (spread_counts), by second and in total.
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

-- Returns nonces by worker, summed over the seconds of the window.
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
