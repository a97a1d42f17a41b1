-- Removes dead letters. ARGV: rules, requeue (1 or 0), then letters ... With requeue each group among them has its problem
-- asked again, in a new group, before the curriculum goes on. Returns {removed, {problems requeued}, what could be leased}.
local removed, problems, groups = 0, {}, {}
for i = 3, #ARGV do
  local letter = drop_letter(ARGV[i])
  if letter then
    removed = removed + 1
    if ARGV[2] == '1' and not groups[letter.group] then
      groups[letter.group] = true
      redis.call('RPUSH', P .. 'requeued', letter.problem)
      problems[#problems + 1] = letter.problem
    end
  end
end
return {removed, problems, available()}
