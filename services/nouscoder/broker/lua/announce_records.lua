-- Notes the names of records that are about to be written, so that one whose rollout is never taken is deleted.
-- ARGV: rules, then names.
local now = now_ms()
for i = 2, #ARGV do redis.call('ZADD', P .. 'records:announced', now, ARGV[i]) end
return #ARGV - 1
