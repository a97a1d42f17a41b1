-- No worker can make a rollout of the problems of these tasks: their groups are given up, and they are not asked again.
-- ARGV: rules, worker, reason, then entry, delivery with epoch of each lease. Returns {rollouts that are abandoned,
-- what could be leased now}. Leases that the worker does not hold any more are passed over.
local worker, reason, ended = ARGV[2], ARGV[3], 0
for i = 4, #ARGV, 2 do
  local entry, lease = ARGV[i], ARGV[i + 1]
  if holds('tasks', entry, lease, worker) then
    local id = rollout_of('tasks', entry)
    redis.call('HSET', P .. 'refused_problems', redis.call('HGET', rollout_key(id), 'problem'), reason)
    ended = ended + cancel_group(group_of(id), 'abandoned', 'refused')
  end
end
return {ended, available()}
