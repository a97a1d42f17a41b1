-- Returns {cursor, {problem, record ...}}: domain/curriculum.py has the form of a record. ARGV: rules.
return {meta_number('cursor'), redis.call('HGETALL', P .. 'problem_statistics')}
