-- Notes the names of records that are about to be written, so that records without a rollout are found and deleted.
-- ARGV: rules, then names.
for i = 2, #ARGV do redis.call('ZADD', P .. 'records:announced', CLOCK, ARGV[i]) end
return #ARGV - 1
