-- The snapshot for why-stalled, at one instant. ARGV: rules, most leases a stream.
-- Returns {now in ms, leases, batch record, ready groups, meta, the last commits (newest first), paused workers,
-- faults of Redis}. A lease is {stream, rollout, worker, ms since the heartbeat, leased at, ms since it moved,
-- delivery}.
local held = {}
for _, stream in ipairs({'tasks', 'grading'}) do
  for _, pending in ipairs(redis.call('XPENDING', P .. stream, WORKERS, '-', '+', ARGV[2])) do
    if pending[2] ~= RELEASED then
      local id = rollout_of(stream, pending[1])
      local times = redis.call('HMGET', rollout_key(id), 'since', 'moved')
      held[#held + 1] = {stream, id, pending[2], pending[3], tonumber(times[1]), CLOCK - tonumber(times[2]), pending[4]}
    end
  end
end

local function info(section)
  local answer = redis.pcall('INFO', section) -- the user may lack the permission
  return type(answer) == 'string' and answer or ''
end

local faults, memory = {}, info('memory')
local limit = tonumber(string.match(memory, 'maxmemory:(%d+)') or 0)
if limit > 0 and tonumber(string.match(memory, 'used_memory:(%d+)')) >= limit then faults[1] = 'redis_full' end
local refusal = redis.pcall('DEL', P .. 'no such key') -- answers what any other write would answer
if type(refusal) == 'table' then
  faults[#faults + 1] = string.find(refusal.err, 'MISCONF') and 'redis_cannot_save' or 'redis_read_only'
end

return {now_ms(), held, redis.call('HGETALL', P .. 'batch'), redis.call('ZCARD', P .. 'ready'), redis.call('HGETALL', META),
  redis.call('XREVRANGE', P .. 'commits', '+', '-', 'COUNT', 21), redis.call('HKEYS', P .. 'workers:paused'), faults}
