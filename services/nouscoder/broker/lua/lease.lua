-- Leases entries of `tasks` or `grading`; for tasks it admits whole groups while there is room.
-- ARGV: rules, stream, worker, name, wanted, then the curriculum's offer: the cursor that it begins at, then place,
-- problem ... in the order of the places. Places that are left out are skipped.
-- Returns {finished, cursor, next group, how many more could be leased, leases}. A lease on a task is
-- {entry, rollout, delivery with epoch, problem, group, minimum policy version, tokens kept of an earlier delivery};
-- one to grade is {entry, rollout, delivery with epoch, header, record, problem}.
local stream, worker, name, wanted = ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local key, now, leased, left = P .. stream, now_ms(), {}, 0
local cursor, offered = meta_number('cursor'), 7
local mode = redis.call('HGET', META, 'mode')
local function answer(finished, left) return {finished, cursor, meta_number('next_group'), left, leased} end
if is_finished() then return answer(1, 1) end
redis.call('HSET', META, 'asked:' .. stream, now)

-- A restarted worker: the leases of its former incarnation are free at once.
local holders = P .. 'workers:' .. stream
local former = redis.call('HGET', holders, name)
if former ~= worker then
  if former then
    for _, pending in ipairs(redis.call('XPENDING', key, WORKERS, '-', '+', 100000, former)) do
      give_back(stream, pending[1], pending[4], 'deliveries')
    end
    redis.call('XGROUP', 'DELCONSUMER', key, WORKERS, former)
  end
  redis.call('HSET', holders, name, worker)
end

if mode == 'paused' then return answer(0, 0) end

local versions = {} -- group -> its minimum policy version
local function version_of(group)
  versions[group] = versions[group] or tonumber(redis.call('HGET', group_key(group), 'version'))
  return versions[group]
end

local function take(entry, id, delivery)
  move(id, WAITING[stream], BUSY[stream])
  redis.call('HSET', rollout_key(id), 'since', now, 'moved', CLOCK)
  beat(stream, entry)
  if stream == 'grading' then
    local kept = redis.call('HMGET', rollout_key(id), 'header', 'record', 'problem')
    leased[#leased + 1] = {entry, id, ticket(delivery), unpack(kept)}
    return
  end
  local group, known = group_of(id), redis.call('HMGET', rollout_key(id), 'problem', 'partial')
  leased[#leased + 1] = {entry, id, ticket(delivery), known[1], group, version_of(group), known[2] or 0}
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

-- `place` is nil for a requeued problem (remove_letters.lua): its group has a number, but no place.
local function admit_group(problem, place)
  local group, ids = string.format('g%06d', meta_number('next_group')), {}
  for i = 0, R.group_size - 1 do
    local id = group .. '-' .. i
    ids[#ids + 1] = id
    redis.call('HSET', rollout_key(id), 'group', group, 'problem', problem, 'since', now)
    enqueue(stream, id)
  end
  redis.call('SADD', live('queued'), unpack(ids))
  local version = redis.call('HGET', META, 'policy_version')
  redis.call('HSET', group_key(group), 'members', table.concat(ids, ','), 'open', R.group_size, 'version', version)
  if place then redis.call('HSET', group_key(group), 'place', place) end
  redis.call('HINCRBY', OPEN, version, 1)
  count('admitted', R.group_size)
  redis.call('HSETNX', META, 'began', now)
  count('next_group')
end

-- The problem of the next group and its place: a requeued one, else the curriculum's; nil where the offer ends.
local function next_problem()
  local requeued = redis.call('LPOP', P .. 'requeued')
  if requeued then return requeued, nil end
  while ARGV[offered] and tonumber(ARGV[offered]) < cursor do offered = offered + 2 end
  while ARGV[offered + 1] do
    local place, problem = tonumber(ARGV[offered]), ARGV[offered + 1]
    offered, cursor = offered + 2, place + 1
    redis.call('HSET', META, 'cursor', cursor)
    if redis.call('HEXISTS', P .. 'refused_problems', problem) == 0 then return problem, place end
  end
end

-- Admits groups until there is enough to lease; returns how many more could be admitted.
local function admit()
  local free, missing = groups_free(), wanted - #leased
  while missing > 0 and free > 0 do
    local problem, place = next_problem()
    if not problem then break end
    admit_group(problem, place)
    missing, free = missing - R.group_size, free - 1
  end
  return math.max(0, free)
end

-- An entry that waits is QUEUED or SAMPLED, whether it is new or given back.
if redis.call('SCARD', live(WAITING[stream])) > 0 then
  take_released()
  take_new()
end
-- Without a published policy nothing can be sampled. The offered curriculum may be older than the
-- cursor, never newer.
local has_policy = redis.call('HEXISTS', META, 'policy_version') == 1
if stream == 'tasks' and not mode and has_policy and cursor >= tonumber(ARGV[6]) then
  left = admit() * R.group_size
  take_new()
end
left = left + redis.call('SCARD', live(WAITING[stream]))
return answer(0, left)
