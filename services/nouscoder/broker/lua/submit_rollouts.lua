-- Takes sampled rollouts; their records are written before.
-- ARGV: rules, worker, then entry, delivery with epoch, rollout, problem, header, oldest version, newest version, record ...
-- Returns {for each: ok, lost, mismatch (the lease is on another rollout or problem), or unpublished (a version is newer
-- than the newest policy); what could be leased now}.
local worker, now, answers = ARGV[2], now_ms(), {}
local published = tonumber(redis.call('HGET', META, 'policy_version') or -1)
local allowed = oldest_allowed()
local done, is_done, records = {}, {}, {} -- entries that this call ends, as a list and as a set; and all records of it

local function submit(entry, delivery, id, problem, header, oldest, newest, record)
  local key, lease = rollout_key(id), entry .. ':' .. delivery
  if is_done[entry] or not holds('tasks', entry, delivery, worker) then
    return redis.call('HGET', key, 'lease:tasks') == lease and 'ok' or 'lost'
  end
  if rollout_of('tasks', entry) ~= id or redis.call('HGET', key, 'problem') ~= problem then return 'mismatch' end
  if tonumber(newest) > published then return 'unpublished' end
  -- garbage.lua may have chosen the record for deletion meanwhile.
  if not redis.call('ZSCORE', P .. 'records:announced', record) then return 'lost' end
  done[#done + 1], is_done[entry] = entry, true
  redis.call('HSET', key, 'header', header, 'record', record, 'oldest', oldest, 'lease:tasks', lease, 'since', now)
  if redis.call('HDEL', key, 'partial') == 1 then redis.call('UNLINK', partial_key(id)) end -- the record has its tokens
  move(id, 'sampling', 'sampled')
  enqueue('grading', id)
  note_token(group_of(id), tonumber(oldest), allowed)
  return 'ok'
end

for i = 3, #ARGV, 8 do
  local answer, record = submit(unpack(ARGV, i, i + 7)), ARGV[i + 7]
  records[#records + 1] = record
  -- A rollout that is submitted twice keeps its first record. A repeated call has the same name, which is not garbage.
  if redis.call('HGET', rollout_key(ARGV[i + 2]), 'record') ~= record then redis.call('SADD', GARBAGE, record) end
  answers[#answers + 1] = answer
end
drop_entries('tasks', done)
each_chunk(#records, function(first, last)
  redis.call('ZREM', P .. 'records:announced', unpack(records, first, last))
end)
return {answers, available()}
