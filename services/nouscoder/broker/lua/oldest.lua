-- The age of the oldest unfinished entry of tasks and of grading, in milliseconds by Redis' clock; 0 without one. ARGV:
-- rules.
local now = redis.call('TIME')
local ages = {}
for i, stream in ipairs({'tasks', 'grading'}) do
  local first = redis.call('XRANGE', P .. stream, '-', '+', 'COUNT', 1)[1]
  local age = first and now[1] * 1000 + math.floor(now[2] / 1000) - tonumber(string.match(first[1], '^%d+')) or 0
  ages[i] = math.max(0, age)
end
return ages
