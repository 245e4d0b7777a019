-- Locks a job whose batches are all done, for the worker that builds the job's answer. Limits the number of attempts.
--
-- KEYS: 1 job            its hash; its working keys are this plus a suffix
-- ARGV: 1 token          of this attempt
--       2 lock_s         seconds without progress after which another worker may lock the job
--       3 most_tries     attempts allowed; one more fails the job
--       4 now            seconds since the epoch
--       5 failed_ttl     seconds a failed job is kept
-- Returns 1 if the calling worker must build the answer, else 0.
local job = KEYS[1]
local token, lock_s, most_tries, now, failed_ttl = unpack(ARGV)
if not is_active(redis.call('HGET', job, 'status')) or redis.call('SCARD', job .. ':todo') > 0 then
  return 0
end
if not redis.call('SET', job .. ':finishing', token, 'NX', 'EX', lock_s) then
  -- The same token: this call is a repeat because its first answer was lost.
  return redis.call('GET', job .. ':finishing') == token and 1 or 0
end
if redis.call('HINCRBY', job, 'finish_tries', 1) > tonumber(most_tries) then
  redis.call('HSET', job, 'error', 'Its answer could not be built: ' .. most_tries ..
    ' workers died or lost Redis over it. Look into the workers\' logs, then send fewer nonces in one request.')
  retire(job, 'failed', now, failed_ttl)
  return 0
end
return 1
