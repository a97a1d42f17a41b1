-- A worker stops: what it holds waits again at once, and these deliveries do not count. ARGV: rules, worker, name.
-- Answers {leases given back, what could be leased now}.
local worker, name, released = ARGV[2], ARGV[3], 0
for _, stream in ipairs({'tasks', 'grading'}) do
  for _, pending in ipairs(redis.call('XPENDING', P .. stream, WORKERS, '-', '+', 100000, worker)) do
    redis.call('HINCRBY', rollout_key(rollout_of(stream, pending[1])), 'returned', 1)
    give_back(stream, pending[1], pending[4], 'deliveries')
    released = released + 1
  end
  redis.call('XGROUP', 'DELCONSUMER', P .. stream, WORKERS, worker)
  if redis.call('HGET', P .. 'workers:' .. stream, name) == worker then
    redis.call('HDEL', P .. 'workers:' .. stream, name)
  end
end
redis.call('HDEL', P .. 'workers:paused', worker)
return {released, available()}
