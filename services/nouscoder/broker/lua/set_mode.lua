-- ARGV: rules, mode (draining, paused or running). Returns {former mode, what could be leased now}.
local former = redis.call('HGET', META, 'mode') or 'running'
if ARGV[2] == 'running' then redis.call('HDEL', META, 'mode') else redis.call('HSET', META, 'mode', ARGV[2]) end
return {former, available()}
