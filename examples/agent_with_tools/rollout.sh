#!/bin/sh
# One rollout of two turns, made by curl. URL: generation.openai.http of a run with generation.environment.kind "agent".
set -eu
URL=$1
ask() {  # PATH BODY [KEY]
    got=$(curl --silent --show-error --fail-with-body --json "$2" --header "Authorization: Bearer ${3-}" "$URL$1") ||
        { printf '%s\n' "$got" >&2; exit 1; }
    printf '%s\n' "$got"
}
in_json() {  # JSON FILTER
    printf '%s' "$1" | jq -rc "$2"
}
session=$(ask /v1/sessions '{"wait_s": 60}')
id=$(in_json "$session" .id)
key=$(in_json "$session" .key)
messages=$(in_json "$session" .messages)

answer=$(ask /v1/chat/completions "{\"model\": \"any\", \"max_tokens\": 32, \"messages\": $messages}" "$key")
in_json "$answer" '"the policy: \(.choices[0].message.content)"'
messages=$(in_json "$answer" "$messages + [.choices[0].message,
    {role: \"user\", content: \"Write the whole program again.\"}]")
answer=$(ask /v1/chat/completions "{\"model\": \"any\", \"messages\": $messages}" "$key")
in_json "$answer" '"again: \(.choices[0].message.content)"'

ask "/v1/sessions/$id/reward" '{"reward": 1}' "$key"
