-- The beginning of every script. KEYS[1]: prefix of the run's keys. ARGV[1]: the rules of the run, JSON.
-- A rollout in flight is a member of exactly one set live:STATE. A script makes all its checks before its first write,
-- so none stops half-way. Counters do not depend on the sets: if a script ends a rollout that is in no set, the ledger
-- is unbalanced and shows the defect. docs/redis-keys.md lists every key.
local P = KEYS[1]
local R = cjson.decode(ARGV[1])
local META = P .. 'meta'
local OPEN = P .. 'open_groups' -- minimum policy version -> groups in flight and not in a batch
local OLDEST = P .. 'oldest_tokens' -- group in flight and not in a batch -> policy version of its oldest known token
local GARBAGE = P .. 'records:garbage' -- names of records to delete
local WORKERS = 'workers' -- the consumer group
local RELEASED = 'released' -- the consumer that holds entries given back
local WAITING = {tasks = 'queued', grading = 'sampled'}
local BUSY = {tasks = 'sampling', grading = 'grading'}
local STATES = {'queued', 'sampling', 'sampled', 'grading', 'graded', 'ready', 'training'}
local STREAM_OF = {queued = 'tasks', sampling = 'tasks', sampled = 'grading', grading = 'grading'}
local HISTORY = 8 -- pass rates kept of one problem
local CHUNK = 500 -- arguments of one command; Lua's stack holds a few thousand
-- The epoch changes when Redis is restored from the learner's state; leases of another epoch are lost.
-- The run's clock counts the milliseconds in which a broker worked (serving.py); Redis' own clock may jump.
local EPOCH, CLOCK = unpack(redis.call('HMGET', META, 'epoch', 'clock'))
EPOCH, CLOCK = EPOCH or '0', tonumber(CLOCK or 0)

local function live(state) return P .. 'live:' .. state end
local function rollout_key(id) return P .. 'rollout:' .. id end
local function partial_key(id) return P .. 'partial:' .. id end -- the first tokens of a rollout that is being sampled
local function group_key(id) return P .. 'group:' .. id end
local function group_of(id) return string.match(id, '^[^-]+') end -- a rollout's id begins with that of its group
local function group_number(group) return tonumber(string.sub(group, 2)) end
local function leased_key(stream) return P .. 'leased:' .. stream end -- entry under lease -> the clock at its heartbeat
local function count(field, n) redis.call('HINCRBY', META, field, n or 1) end
local function meta_number(field) return tonumber(redis.call('HGET', META, field) or 0) end
local function is_finished() return redis.call('HEXISTS', META, 'finish_reason') == 1 end
local function move(id, from, to) redis.call('SMOVE', live(from), live(to), id) end
local function cancelled_key(stream, entry) return P .. 'cancelled:' .. stream .. ':' .. entry end -- why it was cancelled

local function state_of(id)
  for _, state in ipairs(STATES) do
    if redis.call('SISMEMBER', live(state), id) == 1 then return state end
  end
end

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function split(text)
  local parts = {}
  for part in string.gmatch(text, '[^,]+') do parts[#parts + 1] = part end
  return parts
end

-- Calls work(first, last) for each chunk of a list of `size`.
local function each_chunk(size, work)
  for first = 1, size, CHUNK do work(first, math.min(first + CHUNK - 1, size)) end
end

-- Creates the streams' consumer groups where they are missing.
local function open_streams()
  for _, stream in ipairs({'tasks', 'grading'}) do
    redis.pcall('XGROUP', 'CREATE', P .. stream, WORKERS, '0', 'MKSTREAM')
  end
end

-- Rollouts are no longer in flight: deletes their hashes and tokens, and marks their records as garbage.
local function remove_all(ids, from)
  each_chunk(#ids, function(first, last)
    local keys, records = {}, {}
    for i = first, last do
      keys[#keys + 1] = rollout_key(ids[i])
      keys[#keys + 1] = partial_key(ids[i])
      records[#records + 1] = redis.call('HGET', rollout_key(ids[i]), 'record') or nil
    end
    redis.call('SREM', live(from), unpack(ids, first, last))
    redis.call('UNLINK', unpack(keys))
    if #records > 0 then redis.call('SADD', GARBAGE, unpack(records)) end
  end)
end

-- Rollouts reach a final state.
local function leave_all(ids, from, outcome)
  remove_all(ids, from)
  count(outcome, #ids)
end

-- The group is no longer in flight, or it is in a batch now.
local function close_group(group)
  local version = redis.call('HGET', group_key(group), 'version')
  if redis.call('HINCRBY', OPEN, version, -1) == 0 then redis.call('HDEL', OPEN, version) end
  redis.call('DEL', group_key(group))
  redis.call('ZREM', OLDEST, group)
  redis.call('ZREM', P .. 'ready', group)
end

-- Groups in flight and not in a batch, by minimum policy version: {{version, groups} ...}, oldest first; and their sum.
local function open_groups()
  local flat, groups, total = redis.call('HGETALL', OPEN), {}, 0
  for i = 1, #flat, 2 do
    groups[#groups + 1] = {tonumber(flat[i]), tonumber(flat[i + 1])}
    total = total + tonumber(flat[i + 1])
  end
  table.sort(groups, function(a, b) return a[1] < b[1] end)
  return groups, total
end

-- Groups that may be admitted now: docs/design/staleness.md.
local function groups_free()
  local _, open = open_groups()
  local unpublished = math.max(0, meta_number('next_batch') - meta_number('policy_version'))
  return math.floor(R.over_sampling * (R.pipeline_k - unpublished) * R.batch_groups) - open
end

-- The work on these entries is over.
local function drop_entries(stream, entries)
  each_chunk(#entries, function(first, last)
    redis.call('ZREM', leased_key(stream), unpack(entries, first, last))
    redis.call('XACK', P .. stream, WORKERS, unpack(entries, first, last))
    redis.call('XDEL', P .. stream, unpack(entries, first, last))
  end)
end

-- Makes a rollout wait for a worker.
local function enqueue(stream, id)
  redis.call('HSET', rollout_key(id), 'entry', redis.call('XADD', P .. stream, '*', 'rollout', id))
end

-- Ends a group that cannot be trained on any more, whatever its members are doing. Waiting members are not leased any
-- more; the worker of a leased one gets the reason at its next heartbeat. Returns how many rollouts end.
local function cancel_group(group, outcome, reason)
  local unfinished, ended = 0, 0
  for _, id in ipairs(split(redis.call('HGET', group_key(group), 'members'))) do
    local state = state_of(id)
    local stream = STREAM_OF[state]
    if stream then
      local entry = redis.call('HGET', rollout_key(id), 'entry')
      if state == BUSY[stream] then redis.call('SET', cancelled_key(stream, entry), reason, 'PX', R.cancelled_ms) end
      drop_entries(stream, {entry})
      unfinished = unfinished + 1
    end
    if state then
      leave_all({id}, state, outcome)
      ended = ended + 1
    end
  end
  close_group(group)
  if unfinished > 0 then count('cancelled:' .. reason, unfinished) end
  return ended
end

-- The oldest token that the next batch may hold. Each batch makes one policy version, so batch n is trained on by the
-- weights of version n.
local function oldest_allowed()
  return math.max(meta_number('next_batch'), meta_number('policy_version')) - R.max_age
end

-- The group has a token of this policy version. Ends the group as stale if that is too old for every later batch;
-- `allowed` is oldest_allowed().
local function note_token(group, version, allowed)
  local known = redis.call('ZSCORE', OLDEST, group)
  if not known or version < tonumber(known) then redis.call('ZADD', OLDEST, version, group) end
  if version < allowed then cancel_group(group, 'stale', 'stale') end
end

local function drop_stale()
  for _, group in ipairs(redis.call('ZRANGEBYSCORE', OLDEST, '-inf', '(' .. oldest_allowed())) do
    cancel_group(group, 'stale', 'stale')
  end
end

local function rollout_of(stream, entry)
  local found = redis.call('XRANGE', P .. stream, entry, entry)
  return found[1] and found[1][2][2]
end

-- What a lease id ends with: which delivery of the entry it is, and the epoch.
local function ticket(delivery) return delivery .. ':' .. EPOCH end

-- Extends the lease by its whole length.
local function beat(stream, entry) redis.call('ZADD', leased_key(stream), CLOCK, entry) end

-- Whether the worker still holds the lease: same consumer, same delivery, same epoch.
local function holds(stream, entry, lease, worker)
  local pending = redis.call('XPENDING', P .. stream, WORKERS, entry, entry, 1)[1]
  return pending and pending[2] == worker and ticket(pending[4]) == lease
end

-- Adds a complete group to the record of its problem: domain/curriculum.py has the form.
local function note_problem(problem, place, sampled, accepted, no_code, is_filtered)
  local key, recent = P .. 'problem_statistics', {}
  local known = redis.call('HGET', key, problem) or '0 0 0 0 0 -1 '
  local groups, filtered, all, right, solved, last, history, codeless =
    string.match(known, '^(%d+) (%d+) (%d+) (%d+) (%d+) (-?%d+) (%S*) ?(%d*)$')
  for _, pair in ipairs(split(history)) do recent[#recent + 1] = pair end
  recent[#recent + 1] = accepted .. '/' .. sampled
  if #recent > HISTORY then table.remove(recent, 1) end
  local in_row = accepted / sampled >= R.solved_pass_rate and solved + 1 or 0
  -- A group that was in flight when its problem was retired for good does not bring the problem back.
  if R.retires_for_good_after > 0 and tonumber(solved) >= R.retires_for_good_after then in_row = solved end
  redis.call('HSET', key, problem, string.format('%d %d %d %d %d %d %s %d', groups + 1, filtered + (is_filtered and 1 or 0),
    all + sampled, right + accepted, in_row,
    math.max(tonumber(last), tonumber(place or -1)), table.concat(recent, ','), (tonumber(codeless) or 0) + no_code))
end

-- Complete groups since the last batch was made: groups, solved, rollouts, accepted, and the sum of rewards.
local COMPLETED = {'completed:groups', 'completed:solved', 'completed:rollouts', 'completed:accepted', 'completed:reward'}

local function note_complete(rollouts, accepted, reward_sum)
  for i, n in ipairs({1, accepted > 0 and 1 or 0, rollouts, accepted}) do count(COMPLETED[i], n) end
  redis.call('HINCRBYFLOAT', META, COMPLETED[5], string.format('%.17g', reward_sum))
end

-- Groups of equal rewards are filtered, but only so many for one batch.
local function may_filter()
  return R.drop_zero_variance
    and (R.max_filtered_groups == 0 or meta_number('filtered_groups') < R.max_filtered_groups)
end

-- Every member of the group is graded or abandoned, and at least two are graded: decides what happens to the group.
local function complete_group(group)
  local graded, low, high, oldest = {}, math.huge, -math.huge, nil
  local problem, accepted, no_code, reward_sum = nil, 0, 0, 0
  for _, id in ipairs(split(redis.call('HGET', group_key(group), 'members'))) do
    if redis.call('SISMEMBER', live('graded'), id) == 1 then
      local values = redis.call('HMGET', rollout_key(id), 'reward', 'oldest', 'problem', 'accepted', 'no_code')
      graded[#graded + 1] = id
      local reward = tonumber(values[1])
      low, high = math.min(low, reward), math.max(high, reward)
      oldest = math.min(oldest or tonumber(values[2]), tonumber(values[2]))
      problem, accepted, reward_sum = values[3], accepted + tonumber(values[4]), reward_sum + reward
      no_code = no_code + (tonumber(values[5]) or 0)
    end
  end
  note_complete(#graded, accepted, reward_sum)
  -- As has_signal in domain/signal.py: rewards that differ by rounding alone are equal.
  local varied = high - low > math.max(R.equal_share * math.max(-low, high), R.equal_difference)
  local is_filtered = not varied and may_filter()
  note_problem(problem, redis.call('HGET', group_key(group), 'place'), #graded, accepted, no_code, is_filtered)
  if is_filtered then
    count('filtered_groups')
    leave_all(graded, 'graded', 'filtered')
    close_group(group)
    return
  end
  for _, id in ipairs(graded) do move(id, 'graded', 'ready') end
  redis.call('HSET', group_key(group), 'members', table.concat(graded, ','))
  redis.call('ZADD', OLDEST, oldest, group)
  -- Groups are numbered in the order of their admission, so the lowest number is the oldest group.
  redis.call('ZADD', P .. 'ready', group_number(group), group)
end

local function close_member(group)
  if redis.call('HINCRBY', group_key(group), 'open', -1) == 0 then complete_group(group) end
end

local function num_alive(group)
  local keys = {}
  for _, id in ipairs(split(redis.call('HGET', group_key(group), 'members'))) do keys[#keys + 1] = rollout_key(id) end
  return redis.call('EXISTS', unpack(keys))
end

local function drop_letter(letter)
  local found = redis.call('XRANGE', P .. 'dead', letter, letter)[1]
  if not found then return nil end
  local fields = {}
  for i = 1, #found[2], 2 do fields[found[2][i]] = found[2][i + 1] end
  if fields.record ~= '' then redis.call('SADD', GARBAGE, fields.record) end
  redis.call('XDEL', P .. 'dead', letter)
  return fields
end

-- A rollout is given up; its group goes on without it, if two are left.
local function abandon(id, from)
  local group = group_of(id)
  leave_all({id}, from, 'abandoned')
  if num_alive(group) < 2 then cancel_group(group, 'abandoned', 'too_small') else close_member(group) end
end

-- Gives a rollout up: a bounded list of dead letters keeps what is known of it, and its record, for people to look at.
local function dead_letter(stream, id, from, reason, worker, delivery)
  local key, letter = rollout_key(id), {'stream', stream, 'rollout', id, 'reason', reason, 'worker', worker or '',
    'delivery', delivery or 0}
  for _, field in ipairs({'group', 'problem', 'header', 'record', 'regrades', 'failure'}) do
    letter[#letter + 1] = field
    letter[#letter + 1] = redis.call('HGET', key, field) or ''
  end
  redis.call('HDEL', key, 'record') -- so that it does not become garbage
  redis.call('XADD', P .. 'dead', '*', unpack(letter))
  while redis.call('XLEN', P .. 'dead') > R.dead_letters do
    drop_letter(redis.call('XRANGE', P .. 'dead', '-', '+', 'COUNT', 1)[1][1])
  end
  count('dead:' .. stream)
  abandon(id, from)
end

-- A lease is lost: the rollout waits again, or is given up after too many deliveries. Those that their worker gave back
-- do not count. `reason` is why it was lost. Nothing happens when the rollout's group was cancelled meanwhile.
local function give_back(stream, entry, delivery, reason)
  local id = rollout_of(stream, entry)
  if not id then return end
  local returned = tonumber(redis.call('HGET', rollout_key(id), 'returned') or 0)
  if delivery - returned >= R.max_deliveries then
    local worker = redis.call('XPENDING', P .. stream, WORKERS, entry, entry, 1)[1][2]
    drop_entries(stream, {entry})
    dead_letter(stream, id, BUSY[stream], reason, worker, delivery)
  else
    redis.call('ZREM', leased_key(stream), entry)
    redis.call('XCLAIM', P .. stream, WORKERS, RELEASED, 0, entry, 'JUSTID')
    move(id, BUSY[stream], WAITING[stream])
  end
end

-- What could be leased now: rollouts to sample, rollouts to grade, batches (0 or 1); and which policy is the newest.
local function available()
  if is_finished() then return {1, 1, 1, ''} end -- wakes everyone who waits
  local newest = redis.call('HMGET', META, 'policy_version', 'policy_digest', 'mode')
  local policy = newest[1] and newest[1] .. ':' .. newest[2] or ''
  if newest[3] == 'paused' then return {0, 0, 0, policy} end
  local tasks = redis.call('SCARD', live('queued'))
  if newest[1] and not newest[3] then tasks = tasks + R.group_size * math.max(0, groups_free()) end
  local is_batch = redis.call('ZCARD', P .. 'ready') >= R.batch_groups or redis.call('EXISTS', P .. 'batch') == 1
  return {tasks, redis.call('SCARD', live('sampled')), is_batch and 1 or 0, policy}
end
