-- Dead letters, newest first. ARGV: rules, how many at most. Returns {now in ms, {{letter, {field, value ...}} ...}}.
return {now_ms(), redis.call('XREVRANGE', P .. 'dead', '+', '-', 'COUNT', ARGV[2])}
