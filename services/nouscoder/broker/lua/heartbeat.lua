-- Extends leases.
-- ARGV: rules, worker, paused (1 or 0), then stream, entry, delivery with epoch, progress (empty: not told) ...
-- A lease whose progress has stood still for its limit of the run's clock is lost, unless a person paused the worker.
-- Answers the positions (from 0) of lost ones.
local worker, is_paused, lost, now = ARGV[2], ARGV[3] == '1', {}, now_ms()
local PROGRESS_MS = {tasks = R.sampling_progress_ms, grading = R.grading_progress_ms}

local function stands_still(stream, entry, progress)
  if progress == '' then return false end
  local key = rollout_key(rollout_of(stream, entry))
  local known = redis.call('HMGET', key, 'progress', 'moved')
  if known[1] ~= progress or is_paused then
    redis.call('HSET', key, 'progress', progress, 'moved', CLOCK)
    return false
  end
  return CLOCK - tonumber(known[2]) >= PROGRESS_MS[stream]
end

local function extend(stream, entry, lease, progress)
  if stream == 'batches' then
    local held = redis.call('HMGET', P .. 'batch', 'id', 'delivery', 'worker')
    if held[1] ~= entry or ticket(held[2] or '') ~= lease or held[3] ~= worker then return false end
    redis.call('HSET', P .. 'batch', 'beat', now, 'clock', CLOCK)
    return true
  end
  if not holds(stream, entry, lease, worker) then return false end
  if stands_still(stream, entry, progress) then
    give_back(stream, entry, tonumber(string.match(lease, '^%d+')), 'progress')
    return false
  end
  beat(stream, entry)
  redis.call('XCLAIM', P .. stream, WORKERS, worker, 0, entry, 'JUSTID')
  return true
end

if is_paused then redis.call('HSET', P .. 'workers:paused', worker, now)
else redis.call('HDEL', P .. 'workers:paused', worker) end
for i = 4, #ARGV, 4 do
  if not extend(unpack(ARGV, i, i + 3)) then lost[#lost + 1] = (i - 4) / 4 end
end
return lost
