-- Counts a failure to train on the uncommitted batch. ARGV: rules, batch, reason.
-- Returns {1 if that is the uncommitted batch, 1 if it is held back from now on: no learner gets it until it is dropped}.
local record = P .. 'batch'
if redis.call('HGET', record, 'id') ~= ARGV[2] then return {0, 0} end
redis.call('HSET', record, 'failure', ARGV[3])
if redis.call('HINCRBY', record, 'failures', 1) >= R.max_batch_failures then redis.call('HSET', record, 'held_back', 1) end
return {1, redis.call('HEXISTS', record, 'held_back')}
