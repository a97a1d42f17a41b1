-- Takes back every lease that had no heartbeat for its whole length, and forgets consumers long gone.
-- ARGV: rules. Answers the number of leases taken back.
local swept = 0
for _, stream in ipairs({'tasks', 'grading'}) do
  local key, holders = P .. stream, P .. 'workers:' .. stream
  for _, pending in ipairs(redis.call('XPENDING', key, WORKERS, 'IDLE', R.lease_ms, '-', '+', 100000)) do
    if pending[2] ~= RELEASED then
      give_back(stream, pending[1], pending[4])
      swept = swept + 1
    end
  end
  for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', key, WORKERS)) do
    local name, pending, idle_ms = info[2], info[4], info[6]
    if name ~= RELEASED and pending == 0 and idle_ms > R.forget_ms then
      redis.call('XGROUP', 'DELCONSUMER', key, WORKERS, name)
    end
  end
end
return swept
