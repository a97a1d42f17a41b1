-- Takes back leases that a worker gives back: the work waits again at once, and these deliveries do not count.
-- ARGV: rules, worker, name, then stream, entry, delivery with epoch of each lease; without any: all, the worker stops.
-- Returns {leases given back, what could be leased now}.
local worker, name, released = ARGV[2], ARGV[3], 0

local function release(stream, entry, delivery)
  redis.call('HINCRBY', rollout_key(rollout_of(stream, entry)), 'returned', 1)
  give_back(stream, entry, delivery, 'deliveries')
  released = released + 1
end

for i = 4, #ARGV, 3 do
  local stream, entry, lease = unpack(ARGV, i, i + 2)
  if BUSY[stream] and holds(stream, entry, lease, worker) then
    release(stream, entry, tonumber(string.match(lease, '^%d+')))
  end
end
if #ARGV > 3 then return {released, available()} end

for _, stream in ipairs({'tasks', 'grading'}) do
  for _, pending in ipairs(redis.call('XPENDING', P .. stream, WORKERS, '-', '+', 100000, worker)) do
    release(stream, pending[1], pending[4])
  end
  redis.call('XGROUP', 'DELCONSUMER', P .. stream, WORKERS, worker)
  if redis.call('HGET', P .. 'workers:' .. stream, name) == worker then
    redis.call('HDEL', P .. 'workers:' .. stream, name)
  end
end
redis.call('HDEL', P .. 'workers:paused', worker)
return {released, available()}
