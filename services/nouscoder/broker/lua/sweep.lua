-- Takes back leases that had no heartbeat for their whole length, and forgets consumers long gone.
-- ARGV: rules, most leases. Answers the number of leases taken back: that many means that there may be more.
local swept = 0
for _, stream in ipairs({'tasks', 'grading'}) do
  local key = P .. stream
  for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', key, WORKERS)) do
    local name, held, idle_ms = info[2], info[4], info[6]
    if name ~= RELEASED and held > 0 and swept < tonumber(ARGV[2]) then
      local room = ARGV[2] - swept
      for _, pending in ipairs(redis.call('XPENDING', key, WORKERS, 'IDLE', R.lease_ms, '-', '+', room, name)) do
        give_back(stream, pending[1], pending[4])
        swept = swept + 1
      end
    elseif name ~= RELEASED and held == 0 and idle_ms > R.forget_ms then
      redis.call('XGROUP', 'DELCONSUMER', key, WORKERS, name)
    end
  end
end
return swept
