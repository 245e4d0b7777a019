-- Completes a job whose batches are all done: stores its answer and its callback, exactly once.
--
-- KEYS: 1 job            its hash; its working keys are this plus a suffix
--       2 pieces         list of the pieces of a large answer
-- ARGV: 1 result         a small answer, as JSON; '' for a large answer
--       2 n_pieces       number of the pieces of a large answer; 0 for a small answer
--       3 n_bytes        number of the answer's bytes
--       4 now            seconds since the epoch
--       5 ttl            seconds for which the job is kept
--       6 pieces_ttl     seconds for which the pieces are kept: longer, for clients that are still reading
--       7 url            of the job's callback, or ''
--       8 body           of the callback
--       9 callback_ttl   seconds for which the callback is kept
--      10 verdict        of a validation: honest or fraud; '' for another job
-- Returns 1 if this call completed the job, else 0.
local job, pieces = unpack(KEYS)
local result, n_pieces, n_bytes, now, ttl, pieces_ttl, url, body, callback_ttl, verdict = unpack(ARGV)
if not is_active(redis.call('HGET', job, 'status')) or redis.call('SCARD', job .. ':todo') > 0 then
  return 0
end
if n_pieces == '0' then
  redis.call('HSET', job, 'result', result)
else
  if redis.call('LLEN', pieces) ~= tonumber(n_pieces) then
    return 0 -- pieces have expired, because the worker that built them paused for long
  end
  redis.call('RENAME', pieces, job .. ':result')
  redis.call('EXPIRE', job .. ':result', pieces_ttl)
  redis.call('HSET', job, 'result_bytes', n_bytes)
end
retire(job, 'completed', now, ttl)
local id = string.sub(job, #'poc:job:' + 1)
if verdict ~= '' then
  local day = 'poc:stats:validations:' .. string.format('%d', math.floor(tonumber(now) / 86400))
  for name, days in pairs({['poc:stats:verdicts'] = 30, [day] = 2}) do
    redis.call('HINCRBY', name, verdict, 1)
    redis.call('EXPIRE', name, days * 86400)
  end
end
if verdict == 'fraud' then
  note_event('job', 'Job ' .. short_id(id) .. ' found fraud.', id, now)
end
-- The callback is stored in the same atomic step as the answer: exactly once, and never without the answer.
if url ~= '' then
  local outbox = 'poc:outbox:' .. id
  redis.call('HSET', outbox, 'url', url, 'closed', '1')
  local bytes = push_entry(id, body, 1, 0, callback_ttl) -- due at once, also by a clock that is behind
  redis.call('HINCRBY', outbox, 'bytes', bytes)
  redis.call('HINCRBY', outbox, 'waiting', 1)
  redis.call('HSETNX', 'poc:outbox:of_jobs', id, now .. '  ')
  redis.call('EXPIRE', 'poc:outbox:of_jobs', callback_ttl)
  count_job_bytes(bytes, callback_ttl)
end
return 1
