-- The run at one instant. Returns {counters as field, value ...}, {size of each live set}, for tasks, grading and
-- batches {entries nobody holds, entries under lease}, the groups that may be admitted, and some of the problems that
-- are gone from the problem file {problem, rollouts given up ...}; how many problems are refused, and why one is.
-- ARGV: rules.
local sizes = {}
for i, state in ipairs(STATES) do sizes[i] = redis.call('SCARD', live(state)) end

local streams = {}
for i, stream in ipairs({'tasks', 'grading'}) do
  local held = 0
  for _, consumer in ipairs(redis.call('XPENDING', P .. stream, WORKERS)[4] or {}) do
    if consumer[1] ~= RELEASED then held = held + tonumber(consumer[2]) end
  end
  streams[i] = {redis.call('XLEN', P .. stream) - held, held}
end
streams[3] = {math.floor(redis.call('ZCARD', P .. 'ready') / R.batch_groups), redis.call('EXISTS', P .. 'batch')}
return {redis.call('HGETALL', META), sizes, streams, groups_free(),
  redis.call('HSCAN', P .. 'missing_problems', 0, 'COUNT', 50)[2], redis.call('HLEN', P .. 'refused_problems'),
  redis.call('HSCAN', P .. 'refused_problems', 0, 'COUNT', 1)[2][2] or ''}
