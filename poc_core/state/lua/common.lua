-- Each script is prefixed with the functions of this file that it uses (state/scripts.py). Nonces are strings: a Lua
-- number is a double and would round nonces above 2^53.
--
-- Every script names its KEYS and ARGV before anything else. Functions of this file use the same names:
--   job, round       key of the hash of a job or round (poc:job:{id}, poc:round:{id}); its working keys are this plus a
--                    suffix
--   id               id of a job or round, and of its outbox (poc:outbox:{id})
--   now, due         seconds since the epoch
--   ttl              new TTL in seconds of the keys that the function changes
-- Scripts also use keys that KEYS does not list: keys derived from listed keys, and the node's indexes and counters. A
-- cluster would not allow this.

-- Suffixes of a job's working keys, except :finishing: this lock for building the answer must expire in any case.
local WORKING = {':nonces', ':todo', ':free', ':leases', ':attempts', ':values', ':claimed'}

-- Most arguments of one redis.call; unpack fails at about 8,000.
local CHUNK = 1000

local function is_active(status)
  return status == 'queued' or status == 'running'
end

-- Extends the life of a job and its indexes to `ttl` seconds, because progress was made.
local function touch(job, ttl)
  redis.call('EXPIRE', job, ttl)
  for _, suffix in ipairs(WORKING) do
    redis.call('EXPIRE', job .. suffix, ttl)
  end
  local model = redis.call('HGET', job, 'model')
  redis.call('EXPIRE', 'poc:jobs:active:' .. model, ttl)
  redis.call('EXPIRE', 'poc:jobs:line:' .. model, ttl)
  redis.call('EXPIRE', 'poc:jobs:models', ttl)
  redis.call('EXPIRE', 'poc:queued_nonces', ttl)
end

-- Returns true if the error `why` of a pcall means that Redis is out of memory.
local function is_full(why)
  return string.find(type(why) == 'table' and why.err or tostring(why), 'OOM ', 1, true) ~= nil
end

-- Lets a script write although Redis is out of memory, which refuses only the first write of a script. For deliveries,
-- which free the memory. `key`: a key that the caller may write; a key derived from it is deleted and never exists.
local function write_even_if_full(key)
  redis.call('DEL', key .. ':none')
end

-- A job stands in the line as if it were created this many seconds later for each of its nonces, and at most MOST_S
-- later. So small jobs pass a large job that is not much older, and no job waits forever.
local NONCE_S, MOST_S = 0.1, 600

-- Adds a job to its model's line, the queue of jobs with batches to lease: validations first, then older and smaller
-- jobs first. Returns true if the job was missing in the line. The job's hash must have its TTL.
local function join_line(job)
  local model, kind, created_at, n_total = unpack(redis.call('HMGET', job, 'model', 'kind', 'created_at', 'n_total'))
  local later = math.min(NONCE_S * (tonumber(n_total) or 0), MOST_S)
  local score = tonumber(created_at) + later - (kind == 'validate' and 1e10 or 0)
  local id = string.sub(job, #'poc:job:' + 1)
  local line = 'poc:jobs:line:' .. model
  local is_new = redis.call('ZADD', line, 'NX', string.format('%.6f', score), id) == 1
  if redis.call('TTL', line) < 0 then -- the line was empty
    redis.call('EXPIRE', line, redis.call('TTL', job))
  end
  return is_new
end

-- Moves a lease of a job or round (`work`) from :leases to :free. Requests get free leases before new batches/nonces.
local function free_lease(work, lease)
  redis.call('HDEL', work .. ':leases', lease)
  redis.call('ZADD', work .. ':free', string.match(lease, '^%d+'), lease)
  redis.call('EXPIRE', work .. ':free', redis.call('TTL', work))
  if string.sub(work, 1, 8) == 'poc:job:' then
    join_line(work)
  end
end

-- Counts the nonces in the JSON list of a batch.
local function count_nonces(batch)
  return select(2, string.gsub(batch, ',', '')) + 1
end

-- Returns the worker id and the token in a lease's value, which is 'worker id|second of leasing|token'. The token is
-- 'n' and the number of the lease request (state/work.py). An earlier release wrote values of rounds' leases without a
-- token: 'worker id|second of expiry'.
local function lease_parts(lease)
  local worker, token = string.match(lease, '^(.*)|%d+|(%w+)$')
  return worker or string.match(lease, '^(.*)|') or lease, token or ''
end

-- Returns a lease's state: 'held', 'dead' if its worker is dead, or 'forgotten' if its live worker's heartbeat no
-- longer lists the lease. Such a worker has ended the lease, but Redis was killed and lost that write.
local beats = {} -- cache of the heartbeats that this script has read, by worker id
local function lease_state(lease)
  local worker, token = lease_parts(lease)
  if not beats[worker] then
    local key = 'poc:worker:' .. worker
    local is_alive = redis.call('EXISTS', key) == 1
    beats[worker] = {is_alive = is_alive, told = is_alive and redis.call('HGET', key, 'in_hand') or ''}
  end
  if not beats[worker].is_alive then
    return 'dead'
  end
  local n_taken, in_hand = string.match(beats[worker].told, '^"(%d+):([%d ]*)"$')
  local number = string.match(token, '^n(%d+)$')
  local is_in_hand = not (n_taken and number) or tonumber(number) > tonumber(n_taken)
    or string.find(' ' .. in_hand .. ' ', ' ' .. number .. ' ', 1, true)
  return is_in_hand and 'held' or 'forgotten'
end

-- Frees the leases of a job or round that no worker holds. Returns each of these leases with its worker, and with
-- is_dead = true if the worker is dead.
local function free_lost(work)
  local freed, leases = {}, redis.call('HGETALL', work .. ':leases')
  for i = 1, #leases, 2 do
    local state = lease_state(leases[i + 1])
    if state ~= 'held' then
      free_lease(work, leases[i])
      freed[#freed + 1] = {lease = leases[i], worker = lease_parts(leases[i + 1]), is_dead = state == 'dead'}
    end
  end
  return freed
end

-- Returns the name of the worker with this id. The name stays the same after restarts: it is the id without the suffix
-- of one start (poc_core/serving/places.py).
local OF_ONE_START = '%-' .. string.rep('[0-9a-f]', 6) .. '$'
local function name_of_worker(id)
  return (string.gsub(id, OF_ONE_START, ''))
end

-- Returns the record in a worker's heartbeat, as JSON; '' if the worker is dead.
local function worker_record(id)
  local found = redis.pcall('HGET', 'poc:worker:' .. id, 'record')
  return type(found) == 'table' and '?' or found or '' -- an error: a key that is no hash is no worker's record
end

-- Adds `n` to a field of a hash. Returns true if the field is new. Only a new field renews the hash's TTL: setting the
-- TTL with each count would double the cost.
local function count_in(key, field, n, ttl)
  local is_first = redis.call('HINCRBY', key, field, n) == tonumber(n)
  if is_first then
    redis.call('EXPIRE', key, ttl)
  end
  return is_first
end

-- Adds `n` to `field` in those time steps of the history that contain `second`.
local function count_past(field, n, second)
  -- {seconds per time step, seconds for which the step is kept} (state/history.py)
  local PAST = {{5, 960}, {20, 3720}, {120, 22000}, {480, 87400}}
  for _, step in ipairs(PAST) do
    local key = string.format('poc:past:%d:%d', step[1], math.floor(tonumber(second) / step[1]) * step[1])
    count_in(key, field, n, step[2])
  end
end

-- Adds `n` nonces, which a worker computed in `second` for a job or a round, to the node's counters.
local function count_processed(n, second, worker, ttl)
  redis.call('INCRBY', 'poc:stats:total', n)
  if count_in('poc:stats:by:' .. second, worker, n, 60) then
    redis.call('EXPIRE', 'poc:stats:total', ttl)
  end
  count_past(name_of_worker(worker), n, second)
end

-- A value long enough that Redis converts the hash to a table, permanently. Without a table, Redis scans a hash of up
-- to 512 fields in each lookup.
local LONG = string.rep('-', 65)

local function make_table(key)
  redis.call('HSET', key, '', LONG)
  redis.call('HDEL', key, '')
end

-- Moves a round's latest counts from its hash :counted (second|worker -> nonces) to the counters that clients read.
-- lease.lua calls this once a second, because nine commands for each batch would be a third of the batch's cost. The
-- field '' of the hash is not a count (see LONG).
local function spread_counts(round, ttl)
  local key = round .. ':counted'
  local counts = redis.call('HGETALL', key)
  redis.call('DEL', key)
  redis.call('HSET', key, '', LONG)
  redis.call('EXPIRE', key, ttl)
  for i = 1, #counts, 2 do
    local second, worker = string.match(counts[i], '^(%d+)|(.*)$')
    if second then
      local n = counts[i + 1]
      redis.call('HINCRBY', round, 'by:' .. name_of_worker(worker), n)
      count_in(round .. ':workers', worker, n, ttl)
      count_in(round .. ':rate:' .. second, worker, n, 60)
      count_processed(n, second, worker, ttl)
    end
  end
end

local EVENTS_TTL = 30 * 86400

-- Stores an event. `text`: a sentence for the operator. `about`: the worker, job, round or receiver of the event.
local function note_event(kind, text, about, at)
  -- Most events of each kind, 1,000 in total: no kind displaces another.
  local MOST_EVENTS =
    {worker = 250, deployment = 100, round = 150, job = 150, receiver = 100, refused = 150, key = 50, node = 50}
  local key = 'poc:events:' .. kind
  redis.call('LPUSH', key, cjson.encode({kind = kind, text = text, about = about, at = tonumber(at)}))
  redis.call('LTRIM', key, 0, MOST_EVENTS[kind] - 1)
  redis.call('EXPIRE', key, EVENTS_TTL)
  redis.call('INCR', 'poc:events')
  redis.call('EXPIRE', 'poc:events', EVENTS_TTL)
end

-- Shortens the id of a job or round for an event.
local function short_id(id)
  return string.sub(id, 1, 8)
end

-- Shortens a UTF-8 text for an event to at most 300 bytes, between two characters.
local function shortened(text)
  local kept = string.sub(text, 1, 300)
  return string.match(text, '^[\128-\191]', 301) and string.gsub(kept, '[\192-\255][\128-\191]*$', '') or kept
end

-- Ends an active job with this status. Keeps only the job's hash, for `ttl` seconds. Subtracts the job's uncomputed
-- nonces from the queued nonces.
local function retire(job, status, now, ttl)
  local fields = redis.call('HMGET', job, 'model', 'n_total', 'n_done')
  local left = (tonumber(fields[2]) or 0) - (tonumber(fields[3]) or 0)
  if left > 0 then
    redis.call('DECRBY', 'poc:queued_nonces', string.format('%d', left))
  end
  redis.call('HSET', job, 'status', status, 'finished_at', now)
  redis.call('EXPIRE', job, ttl)
  local gone = {job .. ':finishing'}
  for _, suffix in ipairs(WORKING) do
    gone[#gone + 1] = job .. suffix
  end
  redis.call('UNLINK', unpack(gone))
  local id = string.sub(job, #'poc:job:' + 1)
  if status == 'failed' then
    note_event('job', 'Job ' .. short_id(id) .. ' failed: ' .. (redis.call('HGET', job, 'error') or 'no reason is known'), id, now)
  end
  redis.call('ZREM', 'poc:jobs:active:' .. fields[1], id)
  redis.call('ZREM', 'poc:jobs:line:' .. fields[1], id)
  if status ~= 'completed' then -- the job sends no callback
    redis.call('HDEL', 'poc:outbox:of_jobs', id)
  end
end

-- Counts a worker that died or lost its engine while it computed this batch. The `limit`-th such worker fails the job.
-- Returns true if the job failed. A worker id counts once, because each engine start has a new id. :attempts has the
-- worker ids of each batch, one per line.
local function count_loss(job, batch, worker, limit, now, ttl)
  local lost = redis.call('HGET', job .. ':attempts', batch) or ''
  if not string.find('\n' .. lost, '\n' .. worker .. '\n', 1, true) then
    lost = lost .. worker .. '\n'
    redis.call('HSET', job .. ':attempts', batch, lost)
  end
  local losses = select(2, string.gsub(lost, '\n', ''))
  if losses < tonumber(limit) then
    redis.call('EXPIRE', job .. ':attempts', redis.call('TTL', job))
    return false
  end
  redis.call('HSET', job, 'error', 'Batch ' .. batch .. ' was given up after ' .. string.format('%d', losses) ..
    ' workers lost their engine or died while they computed it. ' ..
    'Look into the workers\' logs, then send the request again.')
  retire(job, 'failed', now, ttl)
  return true
end

-- Returns the name, in a round's :leases and :free, of a lease of `places` nonces. `first`: index of the first of these
-- nonces in the round's nonce sequence.
local function member(first, places)
  return string.format('%d:%d', first, places)
end

-- Sets the next delivery of an outbox to `due`, replacing any earlier time.
local function due_outbox(id, due, ttl)
  redis.call('ZADD', 'poc:outbox:due', due, id)
  redis.call('EXPIRE', 'poc:outbox:due', ttl)
end

-- Adds `bytes`, which may be negative, to the bytes of all jobs' waiting callbacks.
local function count_job_bytes(bytes, ttl)
  -- Unformatted, Lua's -0 becomes '-0', which Redis rejects as a number.
  redis.call('INCRBY', 'poc:outbox:job_bytes', string.format('%d', bytes))
  redis.call('EXPIRE', 'poc:outbox:job_bytes', ttl)
end

-- Returns true if a job's callback, or the callback's receiver, failed at least `tries` times in a row. `place`: the
-- job's value in poc:outbox:of_jobs.
local function is_failing(id, place, tries)
  local found = redis.pcall('HMGET', 'poc:outbox:' .. id, 'url', 'failures')
  local url, failures = unpack(found) -- nothing where the record cannot be read
  local receiver = string.match(place, '^%S+ (%S*)')
  local silent = url and receiver and redis.call('HGET', 'poc:receiver:' .. receiver, 'failures')
  return math.max(tonumber(failures) or 0, tonumber(silent) or 0) >= tries
end

-- Deletes a job's callback and notes why. Clients can still poll the job's answer.
local function drop_callback(id, why, now, ttl)
  local outbox = 'poc:outbox:' .. id
  count_job_bytes(-(tonumber(redis.call('HGET', outbox, 'bytes')) or 0), ttl)
  redis.call('UNLINK', outbox, outbox .. ':entries')
  redis.call('ZREM', 'poc:outbox:due', id)
  redis.call('HDEL', 'poc:outbox:of_jobs', id)
  note_event('receiver', 'The callback of job ' .. short_id(id) .. ' is given up: ' .. why, id, now)
end

-- Prefixes an outbox entry with its number of artifacts and '|'. Only Python parses the entry
-- (state/entries.py).
local function counted_entry(n, entry)
  return n .. '|' .. entry
end

local function entry_count(counted)
  return tonumber(string.match(counted, '^(%d+)|'))
end

-- Returns the largest number of bytes that a counted entry of `n` artifacts takes in a payload. There each artifact has
-- field names.
local function payload_bytes(counted, n)
  return #counted + 32 * n
end

-- Appends an entry of `n` artifacts to an outbox. The outbox is due at `due`, unless it already has a time. Returns the
-- entry's bytes, which the caller must add to the outbox's field `bytes`.
local function push_entry(id, entry, n, due, ttl)
  local outbox = 'poc:outbox:' .. id
  local counted = counted_entry(n, entry)
  local is_first = redis.call('RPUSH', outbox .. ':entries', counted) == 1
  if is_first then -- lease.lua extends the TTLs of a generating round, and each delivery those of its outbox
    redis.call('EXPIRE', outbox, ttl)
    redis.call('EXPIRE', outbox .. ':entries', ttl)
  end
  if redis.call('ZADD', 'poc:outbox:due', 'NX', due, id) == 1 then
    redis.call('EXPIRE', 'poc:outbox:due', ttl)
  end
  return #counted
end

-- Sets when the first payload of a round that begins to generate is due. Workers' clocks may be ahead.
local function due_first(id, due)
  if redis.call('HEXISTS', 'poc:outbox:' .. id, 'url') == 1 then
    redis.call('HSETNX', 'poc:outbox:' .. id, 'next_at', due)
  end
end

-- Extends the life of all keys of a round that generates or validates to `ttl` seconds.
local function keep_round(id, generating, ttl)
  local round, outbox = 'poc:round:' .. id, 'poc:outbox:' .. id
  for _, suffix in ipairs({'', ':leases', ':free', ':workers', ':excluded', ':valid'}) do
    redis.call('EXPIRE', round .. suffix, ttl)
  end
  for _, key in ipairs({outbox, outbox .. ':entries', generating, 'poc:round:current'}) do
    redis.call('EXPIRE', key, ttl)
  end
end

-- Ends a round. What waits in its outbox is delivered at once; the outbox is kept for at most `ttl` seconds.
local function close_round(round, state, now, ttl)
  spread_counts(round, ttl)
  redis.call('HSET', round, 'state', state)
  redis.call('HSETNX', round, 'stopped_at', now)
  redis.call('EXPIRE', round, ttl)
  local id = string.sub(round, #'poc:round:' + 1)
  if redis.call('HEXISTS', 'poc:outbox:' .. id, 'url') == 1 then
    local outbox = 'poc:outbox:' .. id
    redis.call('HSET', outbox, 'closed', '1')
    redis.call('EXPIRE', outbox, ttl)
    redis.call('EXPIRE', outbox .. ':entries', ttl)
    if redis.call('HEXISTS', outbox, 'failures') == 0 then
      redis.call('HSET', outbox, 'next_at', now) -- also for values that a worker still computes
      if redis.call('LLEN', outbox .. ':entries') > 0 then
        due_outbox(id, now, ttl)
      end
    end
  end
end

-- Ends a generating round if all nonces of its sequence have been leased and no lease is left to compute.
local function end_if_exhausted(round, generating, now, ttl)
  local state, next_place, places = unpack(redis.call('HMGET', round, 'state', 'next', 'places'))
  if state ~= 'GENERATING' or tonumber(next_place) < tonumber(places)
    or redis.call('HLEN', round .. ':leases') > 0 or redis.call('ZCARD', round .. ':free') > 0 then
    return
  end
  redis.call('HSET', round, 'exhausted', '1')
  close_round(round, 'STOPPED', now, ttl)
  local id = string.sub(round, #'poc:round:' + 1)
  note_event('round', 'Round ' .. short_id(id) .. ' has computed all nonces of its sequence.', id, now)
  redis.call('DEL', generating)
end

-- Returns the live hosts, each with the generation that it follows, its state and its engine (report_host.lua).
local function live_hosts(hosts)
  local found = {}
  for _, id in ipairs(redis.call('ZRANGE', hosts, 0, -1)) do
    local generation, state, engine = unpack(redis.call('HMGET', 'poc:host:' .. id, 'generation', 'state', 'engine'))
    if state then
      found[#found + 1] = {id = id, generation = generation, state = state, engine = engine or ''}
    end
  end
  return found
end

-- Returns a deployment's generation as a number; 0 if foreign content is no number.
local function generation_of(text)
  return tonumber(string.match(text or '', '^%d+$') and #text <= 12 and text or '0')
end
