-- Keeps pieces of rollouts that are being sampled. Only the holder of the lease can add one.
-- ARGV: rules, worker, then entry, delivery with epoch, number of the first token, number of the token after the last,
-- oldest version, newest version, piece ...
-- Returns for each how many tokens are kept of its rollout now; -1: the lease is lost.
local worker, answers = ARGV[2], {}
local published = tonumber(redis.call('HGET', META, 'policy_version') or -1)
local allowed = oldest_allowed()

local function keep(entry, lease, first, last, oldest, newest, piece)
  if not holds('tasks', entry, lease, worker) or tonumber(newest) > published then return -1 end
  local id = rollout_of('tasks', entry)
  local kept = tonumber(redis.call('HGET', rollout_key(id), 'partial') or 0)
  if first == '0' then
    redis.call('SET', partial_key(id), piece)
  elseif tonumber(first) == kept then
    redis.call('APPEND', partial_key(id), piece)
  else
    return kept -- sent twice, or the piece before is not there
  end
  redis.call('HSET', rollout_key(id), 'partial', last)
  note_token(group_of(id), tonumber(oldest), allowed)
  return redis.call('EXISTS', rollout_key(id)) == 1 and tonumber(last) or -1 -- the group may be stale now
end

for i = 3, #ARGV, 7 do answers[#answers + 1] = keep(unpack(ARGV, i, i + 6)) end
return answers
