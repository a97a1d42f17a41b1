-- Leases the uncommitted batch, or makes the next one from the oldest complete groups.
-- ARGV: rules, worker, name, the learner's run (or nothing), and the batches that its disk holds.
-- Returns {finished}, {-1} (another run, or another number of batches: see restore.lua), or
-- {finished, batch, policy version, lease, rollouts, the groups that became complete while it gathered}.
local worker, name, now = ARGV[2], ARGV[3], now_ms()
local record = P .. 'batch'
if ARGV[4] ~= '' then
  local is_same_run = redis.call('HGET', META, 'run_id') == ARGV[4]
  if not is_same_run or meta_number('batches_committed') ~= tonumber(ARGV[5]) then return {-1} end
end
if is_finished() then return {1} end
redis.call('HSET', META, 'asked:batches', now)
if redis.call('HGET', META, 'mode') == 'paused' then return {0} end

local function answer()
  local values = redis.call('HMGET', record, 'id', 'version', 'delivery', 'completed')
  return {0, tonumber(values[1]), tonumber(values[2]), ticket(values[3]), redis.call('LLEN', P .. 'batch:rollouts'),
    values[4] or ''}
end

if redis.call('EXISTS', record) == 1 then
  local held = redis.call('HMGET', record, 'worker', 'name', 'clock', 'committing', 'held_back')
  local is_free = held[2] == name or CLOCK - tonumber(held[3]) >= R.batch_lease_ms
  if not is_free or held[4] or held[5] then return {0} end
  if held[1] ~= worker then
    redis.call('HSET', record, 'worker', worker, 'name', name, 'since', now)
    count('redelivered:batches')
    if redis.call('HINCRBY', record, 'delivery', 1) > R.max_batch_deliveries then
      redis.call('HSET', record, 'held_back', 1)
      return {0}
    end
  end
  redis.call('HSET', record, 'beat', now, 'clock', CLOCK)
  return answer()
end

drop_stale()
local version = math.max(meta_number('next_batch'), meta_number('policy_version'))
local ready = {} -- complete groups, oldest first: {name, minimum version, members}
for _, group in ipairs(redis.call('ZRANGE', P .. 'ready', 0, -1)) do
  local values = redis.call('HMGET', group_key(group), 'version', 'members')
  ready[#ready + 1] = {group, tonumber(values[1]), values[2]}
end
if #ready < R.batch_groups then return {0} end

-- Every group left behind must still fit into a batch that is not too new for it, so an old group that is not complete
-- yet is waited for, unless the policy `keep` lets groups grow older: docs/design/staleness.md.
local function taken_up_to(limit)
  local taken = 0
  for i = 1, R.batch_groups do
    if ready[i][2] <= limit then taken = taken + 1 end
  end
  return taken
end

local waiting = 0 -- groups whose minimum version is at most that of the loop, without those that will end up stale
for _, group in ipairs(ready) do
  if group[2] < version - R.pipeline_k + 1 then waiting = waiting + 1 end
end
for _, open in ipairs((open_groups())) do
  if R.waits_for_older and open[1] >= version - R.pipeline_k + 1 then
    waiting = waiting + open[2]
    local later_places = (R.pipeline_k - 1 - version + open[1]) * R.batch_groups
    if taken_up_to(open[1]) < math.min(R.batch_groups, waiting - later_places) then return {0} end
  end
end

for i = 1, R.batch_groups do
  local ids = split(ready[i][3])
  for _, id in ipairs(ids) do move(id, 'ready', 'training') end
  redis.call('RPUSH', P .. 'batch:rollouts', unpack(ids))
  close_group(ready[i][1])
end
local completed = redis.call('HMGET', META, unpack(COMPLETED))
for i, value in ipairs(completed) do completed[i] = value or '0' end
redis.call('HDEL', META, 'filtered_groups', unpack(COMPLETED)) -- they count for each batch
redis.call('HSET', record, 'id', redis.call('HINCRBY', META, 'next_batch', 1) - 1, 'version', version, 'delivery', 1,
  'worker', worker, 'name', name, 'beat', now, 'clock', CLOCK, 'since', now, 'completed', table.concat(completed, ' '))
drop_stale()
return answer()
