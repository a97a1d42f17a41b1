-- A run that has ended goes on: groups are admitted again. Call it when `finish` has nothing left. ARGV: rules.
-- Returns 1, or 0 for a run that has not ended.
if not is_finished() then return 0 end
redis.call('HDEL', META, 'finish_reason')
-- A batch that was leased and not committed is gone: the next one gets its number.
if redis.call('EXISTS', P .. 'batch') == 0 then redis.call('HSET', META, 'next_batch', meta_number('batches_committed')) end
open_streams()
return 1
