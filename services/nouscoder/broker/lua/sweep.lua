-- Takes back leases without a heartbeat for their length of the run's clock, and deletes consumers that are long gone.
-- ARGV: rules, most leases. Returns how many leases it took back; if that is the most, there may be more.
local room, swept = tonumber(ARGV[2]), 0
for _, stream in ipairs({'tasks', 'grading'}) do
  local key = P .. stream
  local expired = redis.call('ZRANGEBYSCORE', leased_key(stream), '-inf', CLOCK - R.lease_ms, 'LIMIT', 0, room - swept)
  for _, entry in ipairs(expired) do
    local pending = redis.call('XPENDING', key, WORKERS, entry, entry, 1)[1] -- none: its group was cancelled just now
    if pending then give_back(stream, entry, pending[4], 'deliveries') end
    swept = swept + 1
  end
  -- A Redis that was wiped has no streams until somebody asks for work.
  local consumers = redis.call('EXISTS', key) == 1 and redis.call('XINFO', 'CONSUMERS', key, WORKERS) or {}
  for _, info in ipairs(consumers) do
    local name, held, idle_ms = info[2], info[4], info[6]
    if name ~= RELEASED and held == 0 and idle_ms > R.forget_ms then
      redis.call('XGROUP', 'DELCONSUMER', key, WORKERS, name)
    end
  end
end
return swept
