-- Locks an outbox for one delivery, and chooses the entries of the payload. A payload keeps its entries and number in
-- later tries, until it is delivered, dropped, or found to be too large for its receiver.
--
-- KEYS: 1 outbox          its hash; its entries are this plus :entries
--       2 receiver        the hash of its receiver
-- ARGV: 1 token           of the delivery that begins
--       2 now             seconds since the epoch
--       3 locked_until    seconds since the epoch: end of the lock
--       4 most            most artifacts per payload
--       5 most_bytes      most bytes per payload
--       6 ttl             seconds for which undelivered data is kept
--       7 breaks_at       unanswered tries in a row after which the receiver gets one job payload at a time, as a probe
--       8 probe_until     seconds since the epoch: when another payload may be the probe, in case this courier dies
-- Returns {} if nothing is due, or {'expired'} if the waiting data has expired. Otherwise returns {url, head, payload
-- number, number of entries, number of artifacts, failed tries before this one}.
local outbox, receiver = unpack(KEYS)
local token, now, locked_until, most, most_bytes, ttl, breaks_at, probe_until = unpack(ARGV)
local entries = outbox .. ':entries'
local id = string.sub(outbox, #'poc:outbox:' + 1)
local url, head, number, in_flight, in_flight_artifacts, failures, held_until, next_at, fits, bytes = unpack(redis.call(
  'HMGET', outbox, 'url', 'head', 'number', 'in_flight', 'in_flight_artifacts', 'failures', 'locked_until', 'next_at',
  'fits', 'bytes'))
if not url then -- it has expired, or everything was delivered
  redis.call('HDEL', 'poc:outbox:of_jobs', id)
  return redis.call('ZREM', 'poc:outbox:due', id) == 1 and {'expired'} or {}
end
write_even_if_full(outbox)
local silent, silent_until = unpack(redis.call('HMGET', receiver, 'failures', 'next_at'))
local probes = not head and tonumber(silent or '0') >= tonumber(breaks_at) -- jobs never delay a round
local free_at = math.max(tonumber(held_until or '0'), tonumber(next_at or '0'), probes and tonumber(silent_until) or 0)
if free_at > tonumber(now) then
  redis.call('ZADD', 'poc:outbox:due', 'XX', string.format('%.3f', free_at), id)
  return {}
end
local taken, artifacts = tonumber(in_flight or '0'), tonumber(in_flight_artifacts or '0')
if taken == 0 then
  most = math.min(tonumber(most), tonumber(fits or most))
  most_bytes = tonumber(most_bytes)
  local size, length = 0, redis.call('LLEN', entries)
  -- Reads about one payload at a time, because entries may be megabytes.
  local chunk = math.max(1, math.min(CHUNK, math.floor(most_bytes * length / (tonumber(bytes or '0') + 1))))
  local last = head and length or 1 -- a job's entries are whole bodies
  while taken < last do
    for _, entry in ipairs(redis.call('LRANGE', entries, taken, taken + chunk - 1)) do
      local n = entry_count(entry)
      size = size + payload_bytes(entry, n)
      if taken > 0 and (artifacts + n > most or size > most_bytes or taken >= last) then
        last = 0 -- ends the outer loop: the payload is full
        break
      end
      taken, artifacts = taken + 1, artifacts + n
    end
    last = math.min(last, length)
  end
end
if taken == 0 then
  redis.call('ZREM', 'poc:outbox:due', id)
  return {}
end
if probes then
  redis.call('HSET', receiver, 'next_at', probe_until)
end
redis.call('HSET', outbox, 'in_flight', taken, 'in_flight_artifacts', artifacts, 'token', token,
  'locked_until', locked_until)
if redis.call('HEXISTS', outbox, 'closed') == 0 then -- a closed outbox expires `ttl` after its end, despite new tries
  redis.call('EXPIRE', outbox, ttl)
  redis.call('EXPIRE', entries, ttl)
end
-- Due again when the lock ends, in case its holder dies.
due_outbox(id, locked_until, ttl)
return {url, head or '', number or '0', string.format('%d', taken), string.format('%d', artifacts), failures or '0'}
