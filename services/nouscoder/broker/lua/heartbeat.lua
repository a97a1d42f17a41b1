-- Extends leases. ARGV: rules, worker, then stream, entry, delivery with epoch ...
-- Answers the positions (from 0) of lost ones.
local worker, lost, now = ARGV[2], {}, now_ms()

local function extend(stream, entry, lease)
  if stream == 'batches' then
    local held = redis.call('HMGET', P .. 'batch', 'id', 'delivery', 'worker')
    if held[1] ~= entry or ticket(held[2] or '') ~= lease or held[3] ~= worker then return false end
    redis.call('HSET', P .. 'batch', 'beat', now, 'clock', CLOCK)
    return true
  end
  if not holds(stream, entry, lease, worker) then return false end
  beat(stream, entry)
  redis.call('XCLAIM', P .. stream, WORKERS, worker, 0, entry, 'JUSTID')
  return true
end

for i = 3, #ARGV, 3 do
  if not extend(ARGV[i], ARGV[i + 1], ARGV[i + 2]) then lost[#lost + 1] = (i - 3) / 3 end
end
return lost
