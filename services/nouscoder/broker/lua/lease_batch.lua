-- Leases the batch that has not been committed, or makes the next one of the groups that completed first.
-- ARGV: rules, worker, name. Answers {finished} or {finished, batch, policy version, delivery, rollouts}.
local worker, name, now = ARGV[2], ARGV[3], now_ms()
local record = P .. 'batch'
if is_finished() then return {1} end
redis.call('HSET', META, 'asked:batches', now)

local function answer()
  local values = redis.call('HMGET', record, 'id', 'version', 'delivery', 'rollouts')
  return {0, tonumber(values[1]), tonumber(values[2]), tonumber(values[3]), values[4]}
end

if redis.call('EXISTS', record) == 1 then
  local held = redis.call('HMGET', record, 'worker', 'name', 'beat')
  local is_free = held[2] == name or now - tonumber(held[3]) >= R.batch_lease_ms
  if not is_free then return {0} end
  if held[1] ~= worker then
    redis.call('HSET', record, 'worker', worker, 'name', name, 'since', now)
    redis.call('HINCRBY', record, 'delivery', 1)
    count('redelivered:batches')
  end
  redis.call('HSET', record, 'beat', now)
  return answer()
end

local function drop_stale(group)
  for _, id in ipairs(split(redis.call('HGET', group_key(group), 'members'))) do leave(id, 'ready', 'stale') end
  redis.call('DEL', group_key(group))
  redis.call('LREM', P .. 'ready', 1, group)
end

local version = tonumber(redis.call('HGET', META, 'policy_version') or 0)
local chosen = {}
for _, group in ipairs(redis.call('LRANGE', P .. 'ready', 0, -1)) do
  if version - tonumber(redis.call('HGET', group_key(group), 'oldest')) > R.max_staleness then
    drop_stale(group)
  elseif #chosen < R.batch_groups then
    chosen[#chosen + 1] = group
  end
end
if #chosen < R.batch_groups then return {0} end

local rollouts = {}
for _, group in ipairs(chosen) do
  local members = redis.call('HGET', group_key(group), 'members')
  for _, id in ipairs(split(members)) do move(id, 'ready', 'training') end
  rollouts[#rollouts + 1] = members
  redis.call('DEL', group_key(group))
end
redis.call('LTRIM', P .. 'ready', #chosen, -1)
redis.call('HSET', record, 'id', redis.call('HINCRBY', META, 'next_batch', 1) - 1, 'version', version, 'delivery', 1,
  'rollouts', table.concat(rollouts, ','), 'worker', worker, 'name', name, 'beat', now, 'since', now)
return answer()
