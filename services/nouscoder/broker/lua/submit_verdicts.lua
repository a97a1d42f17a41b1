-- Takes verdicts. ARGV: rules, worker, then entry, delivery with epoch, rollout, payload, reward (empty: internal_error),
-- accepted (1 or 0), no_code (1 or 0) ... Returns {for each: ok, lost, or mismatch (the lease is on another rollout); what could be leased
-- now}.
local worker, now, answers = ARGV[2], now_ms(), {}
local done, is_done = {}, {} -- entries that this call ends, as a list and as a set
local graded, num_accepted = 0, 0

local function regrade(id, failure, delivery)
  redis.call('HSET', rollout_key(id), 'failure', failure)
  count('internal_errors')
  if redis.call('HINCRBY', rollout_key(id), 'regrades', 1) > R.max_regrades then
    return dead_letter('grading', id, 'grading', 'internal_error', worker, delivery)
  end
  move(id, 'grading', 'sampled')
  enqueue('grading', id)
  count('redelivered:grading')
end

local function submit(entry, delivery, id, payload, reward, accepted, no_code)
  local key, lease = rollout_key(id), entry .. ':' .. delivery
  if is_done[entry] or not holds('grading', entry, delivery, worker) then
    return redis.call('HGET', key, 'lease:grading') == lease and 'ok' or 'lost'
  end
  if rollout_of('grading', entry) ~= id then return 'mismatch' end
  done[#done + 1], is_done[entry] = entry, true
  if reward == '' then
    redis.call('HSET', key, 'lease:grading', lease, 'since', now)
    regrade(id, payload, string.match(delivery, '^%d+'))
    return 'ok'
  end
  redis.call('HSET', key, 'lease:grading', lease, 'since', now, 'verdict', payload, 'reward', reward,
    'accepted', accepted, 'no_code', no_code)
  move(id, 'grading', 'graded')
  graded, num_accepted = graded + 1, num_accepted + tonumber(accepted)
  close_member(group_of(id))
  return 'ok'
end

for i = 3, #ARGV, 7 do
  answers[#answers + 1] = submit(ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4], ARGV[i + 5],
    ARGV[i + 6])
end
drop_entries('grading', done)
if graded > 0 then
  count('graded', graded)
  count('accepted', num_accepted)
end
return {answers, available()}
