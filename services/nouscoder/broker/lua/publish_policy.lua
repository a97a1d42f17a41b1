-- Announces a policy. ARGV: rules, version, sha256, manifest. Answers {1 if taken or known, newest version or -1}.
local version, sha256, manifest = tonumber(ARGV[2]), ARGV[3], ARGV[4]
local newest = tonumber(redis.call('HGET', META, 'policy_version') or -1)
if version == newest then
  return {redis.call('HGET', META, 'policy_sha256') == sha256 and 1 or 0, newest}
end
if version ~= newest + 1 then return {0, newest} end
redis.call('HSET', META, 'policy_version', version, 'policy_sha256', sha256, 'policy', manifest)
return {1, version}
