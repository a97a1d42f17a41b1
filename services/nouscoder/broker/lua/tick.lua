-- Advances the run's clock. ARGV: rules, the broker, the tick that it saw last, the milliseconds that it observed since.
-- One broker advances the clock. Another one takes over only when the tick did not change between two of its calls.
-- Returns the tick and the clock.
local me, seen, elapsed = ARGV[2], tonumber(ARGV[3]), ARGV[4]
local tick = meta_number('tick')
if redis.call('HGET', META, 'clock_keeper') ~= me and tick ~= seen then return {tick, CLOCK} end
redis.call('HSET', META, 'clock_keeper', me, 'tick', tick + 1, 'clock', CLOCK + elapsed)
return {tick + 1, CLOCK + elapsed}
