-- Leases entries of `tasks` or `grading`; for tasks it admits whole groups while there is room.
-- ARGV: rules, stream, worker, name, wanted, now the curriculum: number of the next group, its problem, the next ...
-- Answers {finished, next group, {{entry, rollout, delivery with epoch, problem, group, minimum policy version} ...}} for
-- tasks, and {entry, rollout, delivery with epoch, header, record} for each rollout to grade.
local stream, worker, name, wanted = ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local key, now, leased = P .. stream, now_ms(), {}
local next_group = tonumber(redis.call('HGET', META, 'next_group') or 0)
if is_finished() then return {1, next_group, {}} end
redis.call('HSET', META, 'asked:' .. stream, now)

-- A restarted worker: what its former incarnation held is free at once.
local holders = P .. 'workers:' .. stream
local former = redis.call('HGET', holders, name)
if former ~= worker then
  if former then
    for _, pending in ipairs(redis.call('XPENDING', key, WORKERS, '-', '+', 100000, former)) do
      give_back(stream, pending[1], pending[4])
    end
    redis.call('XGROUP', 'DELCONSUMER', key, WORKERS, former)
  end
  redis.call('HSET', holders, name, worker)
end

local function take(entry, id, delivery)
  move(id, WAITING[stream], BUSY[stream])
  redis.call('HSET', rollout_key(id), 'since', now)
  beat(stream, entry)
  if stream == 'grading' then
    leased[#leased + 1] = {entry, id, ticket(delivery), unpack(redis.call('HMGET', rollout_key(id), 'header', 'record'))}
    return
  end
  local values = redis.call('HMGET', rollout_key(id), 'problem', 'group')
  local version = redis.call('HGET', group_key(values[2]), 'version')
  leased[#leased + 1] = {entry, id, ticket(delivery), values[1], values[2], tonumber(version)}
end

local function take_released()
  for _, pending in ipairs(redis.call('XPENDING', key, WORKERS, '-', '+', wanted, RELEASED)) do
    local entry = redis.call('XCLAIM', key, WORKERS, worker, 0, pending[1])[1]
    count('redelivered:' .. stream)
    take(entry[1], entry[2][2], pending[4] + 1)
  end
end

local function take_new()
  if #leased >= wanted then return end
  local answer = redis.call('XREADGROUP', 'GROUP', WORKERS, worker, 'COUNT', wanted - #leased, 'STREAMS', key, '>')
  if not answer then return end
  for _, entry in ipairs(answer[1][2]) do take(entry[1], entry[2][2], 1) end
end

local function admit_group(problem)
  local group, ids = string.format('g%06d', next_group), {}
  for i = 0, R.group_size - 1 do
    local id = group .. '-' .. i
    ids[#ids + 1] = id
    redis.call('HSET', rollout_key(id), 'group', group, 'problem', problem, 'since', now)
    redis.call('SADD', live('queued'), id)
    redis.call('XADD', key, '*', 'rollout', id)
  end
  local version = redis.call('HGET', META, 'policy_version')
  redis.call('HSET', group_key(group), 'members', table.concat(ids, ','), 'open', R.group_size, 'version', version)
  redis.call('HINCRBY', OPEN, version, 1)
  count('admitted', R.group_size)
  count('next_group')
  next_group = next_group + 1
end

local function admit()
  local free, missing = groups_free(), wanted - #leased
  for i = 7 + next_group - tonumber(ARGV[6]), #ARGV do
    if missing <= 0 or free <= 0 then return end
    admit_group(ARGV[i])
    missing, free = missing - R.group_size, free - 1
  end
end

take_released()
take_new()
-- Before a policy is published there is nothing to sample under. The curriculum offered may be older than the
-- cursor, never newer.
local has_policy = redis.call('HEXISTS', META, 'policy_version') == 1
if stream == 'tasks' and has_policy and next_group >= tonumber(ARGV[6]) then
  admit()
  take_new()
end
return {0, next_group, leased}
