-- Names of records to delete. ARGV: rules, most names, then the names deleted since the last call.
if #ARGV > 2 then redis.call('SREM', GARBAGE, unpack(ARGV, 3)) end
-- The sender of a record that was announced long ago died. If it submits the record later, it is refused.
local announced = P .. 'records:announced'
local before = CLOCK - R.announced_ms
local late = redis.call('ZRANGEBYSCORE', announced, '-inf', before, 'LIMIT', 0, CHUNK)
if #late > 0 then
  redis.call('ZREM', announced, unpack(late))
  redis.call('SADD', GARBAGE, unpack(late))
end
return redis.call('SRANDMEMBER', GARBAGE, ARGV[2])
