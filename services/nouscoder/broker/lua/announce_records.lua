-- Notes the names of records that are about to be written, so that records without a rollout are found and deleted.
-- ARGV: rules, then names.
each_chunk(#ARGV - 1, function(first, last)
  local scored = {}
  for i = first, last do
    scored[#scored + 1] = CLOCK
    scored[#scored + 1] = ARGV[i + 1]
  end
  redis.call('ZADD', P .. 'records:announced', unpack(scored))
end)
return #ARGV - 1
