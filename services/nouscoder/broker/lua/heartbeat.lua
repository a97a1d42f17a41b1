-- Extends leases.
-- ARGV: rules, worker, paused (1 or 0), then stream, entry, delivery with epoch, progress (empty: unknown), and the
-- newest policy version that the oldest sampled token may have (empty: unknown, or no token) ...
-- A lease whose progress has stood still for its limit of the run's clock is lost, unless a person paused the worker.
-- Returns {position (from 0), reason (LeaseLoss in domain/lease.py) ...} of lost ones.
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

local function why_lost(stream, entry, lease)
  if is_finished() then return 'finished' end
  if string.match(lease, ':(.*)$') ~= EPOCH then return 'restored' end
  return redis.call('GET', cancelled_key(stream, entry)) or 'expired'
end

-- Returns why the lease is lost, nil when it goes on.
local function extend(stream, entry, lease, progress)
  if stream == 'batches' then
    local held = redis.call('HMGET', P .. 'batch', 'id', 'delivery', 'worker')
    if held[1] ~= entry or ticket(held[2] or '') ~= lease or held[3] ~= worker then
      return why_lost(stream, entry, lease)
    end
    redis.call('HSET', P .. 'batch', 'beat', now, 'clock', CLOCK)
    return nil
  end
  if not holds(stream, entry, lease, worker) then return why_lost(stream, entry, lease) end
  if stands_still(stream, entry, progress) then
    give_back(stream, entry, tonumber(string.match(lease, '^%d+')), 'progress')
    return 'progress'
  end
  beat(stream, entry)
  redis.call('XCLAIM', P .. stream, WORKERS, worker, 0, entry, 'JUSTID')
  return nil
end

if is_paused then redis.call('HSET', P .. 'workers:paused', worker, now)
else redis.call('HDEL', P .. 'workers:paused', worker) end
local allowed = oldest_allowed()
-- Cancel groups first, so that this heartbeat reports all their leases.
for i = 4, #ARGV, 5 do
  local stream, entry, lease, _, version = unpack(ARGV, i, i + 4)
  if version ~= '' and stream == 'tasks' and holds(stream, entry, lease, worker) then
    note_token(group_of(rollout_of(stream, entry)), tonumber(version), allowed)
  end
end
for i = 4, #ARGV, 5 do
  local reason = extend(unpack(ARGV, i, i + 3))
  if reason then
    lost[#lost + 1] = (i - 4) / 5
    lost[#lost + 1] = reason
  end
end
return lost
