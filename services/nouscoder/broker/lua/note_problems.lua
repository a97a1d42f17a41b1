-- Notes which problems the run begins with. ARGV: rules, digests of their ids. Returns those that it began with.
redis.call('SETNX', P .. 'problems', ARGV[2])
return redis.call('GET', P .. 'problems')
