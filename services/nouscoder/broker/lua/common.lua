-- In front of every script. KEYS[1]: prefix of the run's keys. ARGV[1]: the rules of the run, JSON.
-- A rollout in flight is a member of exactly one set live:STATE; a script that moves one checks first and then
-- writes, so that no script stops half-way. Counters are raised whatever the sets say: a script that ends a rollout
-- which is not there makes the ledger unbalanced instead of hiding it.
local P = KEYS[1]
local R = cjson.decode(ARGV[1])
local META = P .. 'meta'
local WORKERS = 'workers' -- the consumer group
local RELEASED = 'released' -- the consumer that holds entries given back
local WAITING = {tasks = 'queued', grading = 'sampled'}
local BUSY = {tasks = 'sampling', grading = 'grading'}
local UNBATCHED = {'queued', 'sampling', 'sampled', 'grading', 'graded', 'ready'}

local function live(state) return P .. 'live:' .. state end
local function rollout_key(id) return P .. 'rollout:' .. id end
local function group_key(id) return P .. 'group:' .. id end
local function count(field, n) redis.call('HINCRBY', META, field, n or 1) end
local function is_finished() return redis.call('HEXISTS', META, 'finish_reason') == 1 end
local function move(id, from, to) redis.call('SMOVE', live(from), live(to), id) end

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function split(text)
  local parts = {}
  for part in string.gmatch(text, '[^,]+') do parts[#parts + 1] = part end
  return parts
end

-- A rollout reaches a final state: its record goes.
local function leave(id, from, outcome)
  redis.call('SREM', live(from), id)
  redis.call('DEL', rollout_key(id))
  count(outcome)
end

local function drop_entry(stream, entry)
  redis.call('XACK', P .. stream, WORKERS, entry)
  redis.call('XDEL', P .. stream, entry)
end

local function rollout_of(stream, entry)
  local found = redis.call('XRANGE', P .. stream, entry, entry)
  return found[1] and found[1][2][2]
end

-- The lease is still this worker's: same consumer, same delivery.
local function holds(stream, entry, delivery, worker)
  local pending = redis.call('XPENDING', P .. stream, WORKERS, entry, entry, 1)[1]
  return pending and pending[2] == worker and pending[4] == tonumber(delivery)
end

-- Every member of the group is graded or abandoned: what becomes of the group.
local function complete_group(group)
  local graded, oldest, varied = {}, nil, false
  for _, id in ipairs(split(redis.call('HGET', group_key(group), 'members'))) do
    if redis.call('SISMEMBER', live('graded'), id) == 1 then
      local values = redis.call('HMGET', rollout_key(id), 'reward', 'oldest')
      graded[#graded + 1] = {id = id, reward = values[1]}
      varied = varied or values[1] ~= graded[1].reward
      local version = tonumber(values[2])
      if not oldest or version < oldest then oldest = version end
    end
  end
  local outcome
  if #graded < 2 then outcome = 'abandoned' elseif R.drop_zero_variance and not varied then outcome = 'filtered' end
  for _, member in ipairs(graded) do
    if outcome then leave(member.id, 'graded', outcome) else move(member.id, 'graded', 'ready') end
  end
  if outcome then
    redis.call('DEL', group_key(group))
  else
    local ids = {}
    for i, member in ipairs(graded) do ids[i] = member.id end
    redis.call('HSET', group_key(group), 'members', table.concat(ids, ','), 'oldest', oldest)
    redis.call('RPUSH', P .. 'ready', group)
  end
end

local function close_member(group)
  if redis.call('HINCRBY', group_key(group), 'open', -1) == 0 then complete_group(group) end
end

-- Given up: the entry is kept in a bounded list of dead letters for whoever looks into it.
local function dead_letter(stream, id, from, reason)
  local group = redis.call('HGET', rollout_key(id), 'group')
  redis.call('XADD', P .. 'dead', 'MAXLEN', '~', 1000, '*', 'stream', stream, 'rollout', id, 'reason', reason)
  count('dead:' .. stream)
  leave(id, from, 'abandoned')
  close_member(group)
end

-- A lease is lost: the rollout waits again, or is given up after too many deliveries.
local function give_back(stream, entry, delivery)
  local id = rollout_of(stream, entry)
  if delivery >= R.max_deliveries then
    drop_entry(stream, entry)
    dead_letter(stream, id, BUSY[stream], 'deliveries')
  else
    redis.call('XCLAIM', P .. stream, WORKERS, RELEASED, 0, entry, 'JUSTID')
    move(id, BUSY[stream], WAITING[stream])
  end
end
