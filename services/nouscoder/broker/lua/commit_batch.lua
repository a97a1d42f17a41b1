-- A batch was trained on: its rollouts are trained. ARGV: rules, batch, step.
-- Answers committed, already, unknown, or twice (a rollout of it was trained on before; nothing is changed).
local batch, step = tonumber(ARGV[2]), ARGV[3]
local record, trained = P .. 'batch', P .. 'trained'
if batch < tonumber(redis.call('HGET', META, 'batches_committed') or 0) then return 'already' end
if tonumber(redis.call('HGET', record, 'id') or -1) ~= batch then return 'unknown' end

local text = redis.call('HGET', record, 'rollouts')
local rollouts, numbers = split(text), {}
for i, id in ipairs(rollouts) do
  numbers[i] = redis.call('HGET', rollout_key(id), 'number')
  -- One bit for each rollout ever admitted: cheap enough to keep for the whole run.
  if not numbers[i] or redis.call('GETBIT', trained, numbers[i]) == 1 then return 'twice' end
end
for i, id in ipairs(rollouts) do
  redis.call('SETBIT', trained, numbers[i], 1)
  leave(id, 'training', 'trained')
end
redis.call('HSET', META, 'batches_committed', batch + 1, 'step', step)
redis.call('XADD', P .. 'commits', 'MAXLEN', '~', 1000, '*', 'batch', batch, 'step', step, 'rollouts', text)
redis.call('DEL', record)
return 'committed'
