-- Gives up the uncommitted batch: its rollouts are abandoned, and the next batch gets its number.
-- ARGV: rules, batch. Returns {dropped, rollouts}, or {unknown, 0}, {committing, 0}, {published, 0} (the policy that it
-- made is known), {training, 0} (a learner that is alive holds it).
local record, rollouts = P .. 'batch', P .. 'batch:rollouts'
local values = redis.call('HMGET', record, 'id', 'committing', 'held_back', 'clock')
if values[1] ~= ARGV[2] then return {'unknown', 0} end
if values[2] then return {'committing', 0} end
if meta_number('policy_version') > tonumber(ARGV[2]) then return {'published', 0} end
if not values[3] and CLOCK - tonumber(values[4]) < R.batch_lease_ms then return {'training', 0} end
local ids = redis.call('LRANGE', rollouts, 0, -1)
leave_all(ids, 'training', 'abandoned')
redis.call('DEL', record, rollouts)
count('next_batch', -1)
return {'dropped', #ids}
