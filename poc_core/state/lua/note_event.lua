-- Stores an event of the node, for its operator.
--
-- KEYS: none
-- ARGV: 1 kind     worker, deployment, round, job, receiver, refused, key or node
--       2 text     a sentence
--       3 about    the worker, job, round or receiver of the event, or ''
--       4 at       seconds since the epoch
-- Returns nothing.
local kind, text, about, at = unpack(ARGV)
note_event(kind, text, about, at)
