-- Who holds what, for how long. ARGV: rules, most entries a stream.
-- Answers {now in ms, {{stream, rollout, worker, ms since the heartbeat, since in ms} ...}, batch record, ready groups}.
local held = {}
for _, stream in ipairs({'tasks', 'grading'}) do
  for _, pending in ipairs(redis.call('XPENDING', P .. stream, WORKERS, '-', '+', ARGV[2])) do
    if pending[2] ~= RELEASED then
      local id = rollout_of(stream, pending[1])
      held[#held + 1] = {stream, id, pending[2], pending[3], tonumber(redis.call('HGET', rollout_key(id), 'since'))}
    end
  end
end
return {now_ms(), held, redis.call('HGETALL', P .. 'batch'), redis.call('ZCARD', P .. 'ready')}
