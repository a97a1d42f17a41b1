-- Agents have abandoned these rollouts: they are given up, and are no dead letters.
-- ARGV: rules, worker, then entry, delivery with epoch of each lease. Returns {rollouts that are given up, what could be
-- leased now}. Leases that the worker does not hold any more are passed over.
local worker, ended = ARGV[2], 0
for i = 3, #ARGV, 2 do
  local entry, lease = ARGV[i], ARGV[i + 1]
  if holds('tasks', entry, lease, worker) then
    local id = rollout_of('tasks', entry)
    drop_entries('tasks', {entry})
    count('cancelled:abandoned')
    abandon(id, 'sampling')
    ended = ended + 1
  end
end
return {ended, available()}
