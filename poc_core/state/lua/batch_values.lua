-- The values of some batches, each as one text: 100,000 short answers would take a client half a second to read.
--
-- KEYS: 1 job      its hash; its working keys are this plus a suffix
-- ARGV: batches    their indexes, any number
-- Returns a batch's values in its order, as JSON texts one a line, '' when one is missing.
local job = KEYS[1]
local batches = ARGV
local found = {}
for i, batch in ipairs(batches) do
  local nonces, values = {}, {}
  for nonce in string.gmatch(redis.call('HGET', job .. ':nonces', batch) or '', '%d+') do
    nonces[#nonces + 1] = nonce
  end
  for first = 1, #nonces, CHUNK do
    local some = redis.call('HMGET', job .. ':values', unpack(nonces, first, math.min(first + CHUNK - 1, #nonces)))
    for _, value in ipairs(some) do
      values[#values + 1] = value or nil
    end
  end
  found[i] = #values == #nonces and table.concat(values, '\n') or ''
end
return found
