-- Ends the run: nothing is admitted any more, and what is in flight is abandoned. ARGV: rules, reason.
-- Returns the number of rollouts that are still to be abandoned: call it again until there are none. A batch whose
-- commit has begun is left to its commit.
local is_committing = redis.call('HEXISTS', P .. 'batch', 'committing') == 1
if not is_finished() then
  redis.call('HSET', META, 'finish_reason', ARGV[2])
  redis.call('DEL', P .. 'tasks', P .. 'grading', P .. 'ready', leased_key('tasks'), leased_key('grading'))
  if not is_committing then redis.call('DEL', P .. 'batch', P .. 'batch:rollouts') end
  open_streams()
end
local room, left = R.commit_chunk, 0
for _, state in ipairs(STATES) do
  local is_kept = state == 'training' and is_committing
  if room > 0 and not is_kept then
    local ids = redis.call('SRANDMEMBER', live(state), room)
    for _, id in ipairs(ids) do
      redis.call('UNLINK', group_key(group_of(id)))
    end
    leave_all(ids, state, 'abandoned')
    if STREAM_OF[state] and #ids > 0 then count('cancelled:finished', #ids) end
    room = room - #ids
  end
  if not is_kept then left = left + redis.call('SCARD', live(state)) end
end
if left == 0 then redis.call('DEL', OPEN, OLDEST) end
return left
