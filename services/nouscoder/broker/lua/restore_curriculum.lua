-- Writes the records of the curriculum that Redis lost. ARGV: rules, cursor, then problem, groups, record ...
-- Of two records of a problem the one with more groups is kept. Returns how many were written.
local key, restored = P .. 'problem_statistics', 0
if tonumber(ARGV[2]) > meta_number('cursor') then redis.call('HSET', META, 'cursor', ARGV[2]) end
for i = 3, #ARGV, 3 do
  local known = redis.call('HGET', key, ARGV[i])
  if tonumber(known and string.match(known, '^%d+') or 0) < tonumber(ARGV[i + 1]) then
    redis.call('HSET', key, ARGV[i], ARGV[i + 2])
    restored = restored + 1
  end
end
return restored
