-- Returns the kept header of each rollout, none for one that is not in flight. ARGV: rules, then rollouts.
local headers = {}
for i = 2, #ARGV do headers[i - 1] = redis.call('HGET', rollout_key(ARGV[i]), 'header') end
return headers
