-- Compares Redis with the learner's state, and restores what Redis forgot.
-- ARGV: rules, run id, identity (JSON), a new epoch, then that state: batches, step, rollouts, next group, bitmap of the
-- trained groups, newest policy version (-1: none), its digest, its manifest; and a cursor that the curriculum reached.
-- Returns {another, identity, batches} (the state is of another run), {ahead, batches, policy version}, {weights} (the
-- newest policy has other weights), {commit} or {publish} (only that is missing: do it and ask again), {same}, or
-- {restored, rollouts lost, 1 unless the run only begins}.
local run_id, identity, epoch = ARGV[2], ARGV[3], ARGV[4]
local batches, step, rollouts, next_group = tonumber(ARGV[5]), ARGV[6], ARGV[7], tonumber(ARGV[8])
local bits, version, digest, manifest = ARGV[9], tonumber(ARGV[10]), ARGV[11], ARGV[12]
local record, members = P .. 'batch', P .. 'batch:rollouts'
local known_run = redis.call('HGET', META, 'run_id')
local committed = meta_number('batches_committed')
local newest = tonumber(redis.call('HGET', META, 'policy_version') or -1)
local held = tonumber(redis.call('HGET', record, 'id') or -1)

local function is_trained(group)
  local number = group_number(group)
  local byte = string.byte(bits, math.floor(number / 8) + 1) or 0
  return math.floor(byte / 2 ^ (7 - number % 8)) % 2 == 1
end

-- How many rollouts of the uncommitted batch are of trained groups, and how many it has.
local function count_batch()
  local ids, trained = redis.call('LRANGE', members, 0, -1), 0
  for _, id in ipairs(ids) do
    if is_trained(group_of(id)) then trained = trained + 1 end
  end
  return trained, #ids
end

if known_run and known_run ~= run_id then return {'another', redis.call('HGET', META, 'identity'), committed} end
-- Redis may lose the batch after the learner has published the policy that the batch made.
if committed > batches or newest > batches + 1 then return {'ahead', committed, newest} end
if newest >= 0 and newest == version and redis.call('HGET', META, 'policy_digest') ~= digest then return {'weights'} end
local num_trained, num_held = count_batch()
if known_run and held == batches - 1 and committed == held and num_trained == num_held then return {'commit'} end
if known_run and committed == batches and (redis.call('GET', P .. 'trained') or '') == bits then
  if version == newest + 1 then return {'publish'} end
  if version <= newest then return {'same'} end
end

-- Rollouts in flight continue, unless the learner has trained on their group: such groups are dropped whole.
open_streams()
local keeps_batch = held == batches and num_trained == 0 and redis.call('HEXISTS', record, 'committing') == 0
local closed = {}
for _, state in ipairs(STATES) do
  local gone = {}
  for _, id in ipairs(redis.call('SMEMBERS', live(state))) do
    local group = group_of(id)
    if state == 'training' then
      if not keeps_batch then gone[#gone + 1] = id end
    elseif is_trained(group) then
      gone[#gone + 1], closed[group] = id, true
    end
  end
  remove_all(gone, state)
end
for group in pairs(closed) do close_group(group) end
if not keeps_batch then redis.call('DEL', record, members) end

-- Every lease ends. Its delivery does not count, because the worker did nothing wrong.
for _, stream in ipairs({'tasks', 'grading'}) do
  local key = P .. stream
  for _, entry in ipairs(redis.call('XRANGE', key, '-', '+')) do
    if redis.call('EXISTS', rollout_key(entry[2][2])) == 0 then drop_entries(stream, {entry[1]}) end
  end
  for _, pending in ipairs(redis.call('XPENDING', key, WORKERS, '-', '+', 1000000)) do
    if pending[2] ~= RELEASED then
      redis.call('XCLAIM', key, WORKERS, RELEASED, 0, pending[1], 'RETRYCOUNT', 0, 'JUSTID')
      move(rollout_of(stream, pending[1]), BUSY[stream], WAITING[stream])
    end
  end
  redis.call('DEL', leased_key(stream))
end

-- The curriculum continues after the places of the groups that Redis lost.
local new_next = math.max(meta_number('next_group'), next_group)
redis.call('HSET', META, 'run_id', run_id, 'identity', identity, 'epoch', epoch, 'trained', rollouts, 'step', step,
  'batches_committed', batches, 'next_batch', keeps_batch and batches + 1 or batches,
  'next_group', new_next, 'cursor', math.max(meta_number('cursor') + new_next - meta_number('next_group'), tonumber(ARGV[13])))
if bits ~= '' then redis.call('SET', P .. 'trained', bits) end
if version > newest then
  redis.call('HSET', META, 'policy_version', version, 'policy_digest', digest, 'policy', manifest)
end
if batches > committed then
  redis.call('XADD', P .. 'commits', 'MAXLEN', '~', 1000, '*', 'batch', batches - 1, 'step', step)
end

-- Whatever was admitted and is neither final nor in flight is lost.
local rest = 0
for _, state in ipairs(STATES) do rest = rest + redis.call('SCARD', live(state)) end
for _, final in ipairs({'trained', 'filtered', 'stale', 'abandoned'}) do rest = rest + meta_number(final) end
local lost_before = meta_number('lost')
local admitted = math.max(meta_number('admitted'), meta_number('next_group') * R.group_size, rest + lost_before)
redis.call('HSET', META, 'admitted', admitted, 'lost', admitted - rest)
return {'restored', admitted - rest - lost_before, (known_run or batches > 0) and 1 or 0}
