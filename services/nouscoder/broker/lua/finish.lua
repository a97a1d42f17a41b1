-- Ends the run: nothing is admitted any more, and what is in flight is abandoned. ARGV: rules, reason.
if is_finished() then return 0 end
redis.call('HSET', META, 'finish_reason', ARGV[2])
for _, state in ipairs({'queued', 'sampling', 'sampled', 'grading', 'graded', 'ready', 'training'}) do
  for _, id in ipairs(redis.call('SMEMBERS', live(state))) do
    redis.call('DEL', group_key(redis.call('HGET', rollout_key(id), 'group')))
    leave(id, state, 'abandoned')
  end
end
redis.call('DEL', P .. 'tasks', P .. 'grading', P .. 'ready', P .. 'batch')
for _, stream in ipairs({'tasks', 'grading'}) do
  redis.call('XGROUP', 'CREATE', P .. stream, WORKERS, '0', 'MKSTREAM')
end
return 1
