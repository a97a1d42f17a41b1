-- Part of the uncommitted batch. ARGV: rules, batch, first rollout (from 0), how many.
-- Returns {header, verdict, reward, record} of each, or nothing when that batch is not there any more.
if redis.call('HGET', P .. 'batch', 'id') ~= ARGV[2] then return {} end
local answers = {}
for i, id in ipairs(redis.call('LRANGE', P .. 'batch:rollouts', ARGV[3], ARGV[3] + ARGV[4] - 1)) do
  answers[i] = redis.call('HMGET', rollout_key(id), 'header', 'verdict', 'reward', 'record')
end
return answers
