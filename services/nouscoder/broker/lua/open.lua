-- Creates the streams' consumer groups where they are missing.
for _, stream in ipairs({'tasks', 'grading'}) do
  redis.pcall('XGROUP', 'CREATE', P .. stream, WORKERS, '0', 'MKSTREAM')
end
return redis.call('EXISTS', P .. 'tasks', P .. 'grading')
