-- Creates the streams where they are missing.
open_streams()
return redis.call('EXISTS', P .. 'tasks', P .. 'grading')
