-- Gives up groups whose problem is gone from the problem file. ARGV: rules, then group, problem ...
-- Answers the number of rollouts that are abandoned.
local problems, dropped = {}, 0
for i = 2, #ARGV, 2 do problems[ARGV[i]] = ARGV[i + 1] end

for _, stream in ipairs({'tasks', 'grading'}) do
  for _, entry in ipairs(redis.call('XRANGE', P .. stream, '-', '+')) do
    local group = redis.call('HGET', rollout_key(entry[2][2]), 'group')
    if group and problems[group] then drop_entry(stream, entry[1]) end
  end
end

for group, problem in pairs(problems) do
  local members = redis.call('HGET', group_key(group), 'members')
  if members then
    local before = dropped
    for _, state in ipairs(STATES) do
      local ids = {}
      for _, id in ipairs(split(members)) do
        if redis.call('SISMEMBER', live(state), id) == 1 then ids[#ids + 1] = id end
      end
      leave_all(ids, state, 'abandoned')
      dropped = dropped + #ids
    end
    close_group(group)
    redis.call('ZREM', P .. 'ready', group)
    redis.call('HINCRBY', P .. 'missing_problems', problem, dropped - before)
  end
end
return dropped
