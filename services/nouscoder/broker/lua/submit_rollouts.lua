-- Takes sampled rollouts. ARGV: rules, worker, then entry, delivery, rollout, problem, payload, text, oldest version ...
-- Answers for each: ok, lost, or mismatch (the lease is on another rollout or problem).
local worker, answers = ARGV[2], {}

local function submit(entry, delivery, id, problem, payload, text, oldest)
  local key, lease = rollout_key(id), entry .. ':' .. delivery
  if not holds('tasks', entry, delivery, worker) then
    return redis.call('HGET', key, 'lease:tasks') == lease and 'ok' or 'lost'
  end
  if rollout_of('tasks', entry) ~= id or redis.call('HGET', key, 'problem') ~= problem then return 'mismatch' end
  drop_entry('tasks', entry)
  redis.call('HSET', key, 'payload', payload, 'text', text, 'oldest', oldest, 'lease:tasks', lease, 'since', now_ms())
  move(id, 'sampling', 'sampled')
  redis.call('XADD', P .. 'grading', '*', 'rollout', id)
  return 'ok'
end

for i = 3, #ARGV, 7 do
  answers[#answers + 1] = submit(ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4], ARGV[i + 5], ARGV[i + 6])
end
return answers
