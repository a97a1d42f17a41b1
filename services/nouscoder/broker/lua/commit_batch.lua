-- A batch was trained on: its rollouts are trained. ARGV: rules, batch, step.
-- Answers committed, already, unknown, or twice (a rollout of it was trained on before; nothing is changed).
-- A large batch takes several calls, each of which answers `more`: from the first on the batch is committed, and
-- neither it nor another is leased until the last.
local batch, step = tonumber(ARGV[2]), ARGV[3]
local record, rollouts, trained = P .. 'batch', P .. 'batch:rollouts', P .. 'trained'
if batch < meta_number('batches_committed') then return 'already' end
if tonumber(redis.call('HGET', record, 'id') or -1) ~= batch then return 'unknown' end

local function numbers_of(ids)
  local numbers = {}
  for i, id in ipairs(ids) do numbers[i] = redis.call('HGET', rollout_key(id), 'number') end
  return numbers
end

if redis.call('HEXISTS', record, 'committing') == 0 then
  local ids = redis.call('LRANGE', rollouts, 0, -1)
  local numbers = numbers_of(ids)
  for i = 1, #ids do
    -- One bit for each rollout ever admitted: cheap enough to keep for the whole run.
    if not numbers[i] or redis.call('GETBIT', trained, numbers[i]) == 1 then return 'twice' end
  end
  redis.call('HSET', record, 'committing', 1)
  if #ids > R.commit_chunk then return 'more' end
end
local ids = redis.call('LRANGE', rollouts, 0, R.commit_chunk - 1)
for _, number in ipairs(numbers_of(ids)) do redis.call('SETBIT', trained, number, 1) end
leave_all(ids, 'training', 'trained')
redis.call('LTRIM', rollouts, #ids, -1)
if redis.call('LLEN', rollouts) > 0 then return 'more' end
redis.call('HSET', META, 'batches_committed', batch + 1, 'step', step)
redis.call('XADD', P .. 'commits', 'MAXLEN', '~', 1000, '*', 'batch', batch, 'step', step)
redis.call('DEL', record)
return 'committed'
