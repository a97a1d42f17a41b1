-- A batch was trained on: its rollouts become TRAINED. ARGV: rules, batch, step, then the numbers of its groups (or none).
-- Returns committed, already, unknown, twice (a group of it was trained on before; nothing is changed), or behind (this
-- is not the batch that the learner trained on: Redis forgot that one).
-- A large batch takes several calls; all but the last return `more`. The batch counts as committed from the first call
-- on, and no batch is leased until the last.
local batch, step = tonumber(ARGV[2]), ARGV[3]
local record, rollouts, trained = P .. 'batch', P .. 'batch:rollouts', P .. 'trained'
if batch < meta_number('batches_committed') then return 'already' end
if tonumber(redis.call('HGET', record, 'id') or -1) ~= batch then
  return #ARGV > 3 and 'behind' or 'unknown'
end

local function groups_of(ids)
  local groups = {}
  for _, id in ipairs(ids) do groups[group_number(group_of(id))] = true end
  return groups
end

local function is_named(groups)
  local left = #ARGV - 3
  if left == 0 then return true end
  for i = 4, #ARGV do
    if not groups[tonumber(ARGV[i])] then return false end
  end
  for _ in pairs(groups) do left = left - 1 end
  return left == 0
end

if redis.call('HEXISTS', record, 'committing') == 0 then
  local ids = redis.call('LRANGE', rollouts, 0, -1)
  local groups = groups_of(ids)
  if not is_named(groups) then return 'behind' end
  for number in pairs(groups) do
    -- One bit for each group ever admitted is small enough to keep for the whole run.
    if redis.call('GETBIT', trained, number) == 1 then return 'twice' end
  end
  for number in pairs(groups) do redis.call('SETBIT', trained, number, 1) end
  redis.call('HSET', record, 'committing', 1)
  if #ids > R.commit_chunk then return 'more' end
end
local ids = redis.call('LRANGE', rollouts, 0, R.commit_chunk - 1)
leave_all(ids, 'training', 'trained')
redis.call('LTRIM', rollouts, #ids, -1)
if redis.call('LLEN', rollouts) > 0 then return 'more' end
redis.call('HSET', META, 'batches_committed', batch + 1, 'step', step)
local totals = {}
for _, field in ipairs({'admitted', 'filtered', 'stale', 'abandoned', 'graded', 'accepted', 'internal_errors'}) do
  totals[#totals + 1] = field
  totals[#totals + 1] = meta_number(field)
end
redis.call('XADD', P .. 'commits', 'MAXLEN', '~', 1000, '*', 'batch', batch, 'step', step, unpack(totals))
redis.call('DEL', record)
return 'committed'
