-- Announces a policy. ARGV: rules, version, digest, manifest.
-- Returns {1 if taken or known, newest version or -1}.
local version, digest, manifest = tonumber(ARGV[2]), ARGV[3], ARGV[4]
local newest = tonumber(redis.call('HGET', META, 'policy_version') or -1)
if version == newest then
  return {redis.call('HGET', META, 'policy_digest') == digest and 1 or 0, newest}
end
if version ~= newest + 1 then return {0, newest} end
redis.call('HSET', META, 'policy_version', version, 'policy_digest', digest, 'policy', manifest)
return {1, version}
