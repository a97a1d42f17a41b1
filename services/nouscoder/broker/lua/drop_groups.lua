-- Gives up groups whose problems are not in the problem file any more. ARGV: rules, then group, problem ...
-- Returns the number of rollouts that are abandoned.
local dropped = 0
for i = 2, #ARGV, 2 do
  local group, problem = ARGV[i], ARGV[i + 1]
  if redis.call('EXISTS', group_key(group)) == 1 then
    local ended = cancel_group(group, 'abandoned', 'problem_gone')
    redis.call('HINCRBY', P .. 'missing_problems', problem, ended)
    dropped = dropped + ended
  end
end
return dropped
