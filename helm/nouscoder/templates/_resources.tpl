{{/* Checks of requests and limits that the schema cannot express: Kubernetes would take them, and the pod would not work. */}}

{{/* A quantity as a number, such as 5Gi. */}}
{{- define "nouscoder.number" -}}
{{- if kindIs "string" . -}}
{{- $digits := regexFind "^[0-9.]+" . -}}
{{- $factors := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- mulf (float64 $digits) (get $factors (trimPrefix $digits .) | default 1) -}}
{{- else -}}
{{- float64 . -}}
{{- end -}}
{{- end -}}

{{/* dict name resources: the value's name for the message, and requests and limits */}}
{{- define "nouscoder.resourceGuards" -}}
{{- $name := .name -}}
{{- $resources := .resources | default dict -}}
{{- $limits := $resources.limits | default dict -}}
{{- range $from := list "requests" "limits" -}}
{{- range $kind, $given := get $resources $from | default dict -}}
{{- $number := include "nouscoder.number" $given | float64 -}}
{{- if and (has $kind (list "memory" "ephemeral-storage")) (lt $number 1048576.0) -}}
{{- fail (printf "%s.%s.%s is %v, which is less than 1Mi: give the unit, such as 2Gi" $name $from $kind $given) -}}
{{- end -}}
{{- if and (contains "/" $kind) (ne $number (floor $number)) -}}
{{- fail (printf "%s.%s has %v %s: a device cannot be divided" $name $from $given $kind) -}}
{{- end -}}
{{- $limit := ternary (get $limits $kind) nil (hasKey $limits $kind) -}}
{{- if and (contains "/" $kind) (ne $number (include "nouscoder.number" ($limit | default 0) | float64)) -}}
{{- fail (printf "%s.requests has %v %s, and limits has %v: Kubernetes wants the same number of a device in both" $name $given $kind ($limit | default 0)) -}}
{{- end -}}
{{- if and (ne $limit nil) (gt $number (include "nouscoder.number" $limit | float64)) -}}
{{- fail (printf "%s.requests.%s is %v, more than %s.limits.%s, which is %v" $name $kind $given $name $kind $limit) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Fails if a resource of a service is wrong. */}}
{{- define "nouscoder.allResourceGuards" -}}
{{- $values := .Values -}}
{{- range $name, $resources := dict "verifier.resources" $values.verifier.resources "verifier.sandbox.pool.resources" $values.verifier.sandbox.pool.resources "broker.resources" $values.broker.resources "generation.resources" $values.generation.resources "learner.resources" $values.learner.resources "learner.runResources" $values.learner.runResources "redis.resources" $values.redis.resources "tests.resources" $values.tests.resources "backup.resources" $values.backup.resources -}}
{{- include "nouscoder.resourceGuards" (dict "name" $name "resources" $resources) -}}
{{- end -}}
{{- $pool := $values.verifier.sandbox.pool -}}
{{- if include "nouscoder.usesRunners" . -}}
{{- $limit := dig "limits" "memory" "" ($pool.resources | default dict) | default 0 -}}
{{- if not $limit -}}
{{- fail "verifier.sandbox.pool.resources.limits.memory must be set: without it a runner may use all memory of its node" -}}
{{- else if le (include "nouscoder.number" $limit | float64) (include "nouscoder.number" $pool.candidateMemory | float64) -}}
{{- fail (printf "verifier.sandbox.pool.resources.limits.memory is %v, not more than a candidate may use (verifier.sandbox.pool.candidateMemory, %v): the kernel would kill the runner with it" $limit $pool.candidateMemory) -}}
{{- else if lt (include "nouscoder.number" $limit | float64) (include "nouscoder.number" $pool.tmpSize | float64) -}}
{{- fail (printf "verifier.sandbox.pool.tmpSize is %v, more than verifier.sandbox.pool.resources.limits.memory, %v: files in /tmp are memory" $pool.tmpSize $limit) -}}
{{- end -}}
{{- end -}}
{{- if .Values.loop.enabled -}}
{{- range $name := list "generation" "learner" -}}
{{- $gpus := 0 -}}
{{- range $kind, $number := (get $values $name).resources.limits | default dict -}}{{- if contains "/" $kind -}}{{- $gpus = add $gpus (int $number) -}}{{- end -}}{{- end -}}
{{- $device := dig $name "device" "" $values.config | toString -}}
{{- if and (hasPrefix "cuda" $device) (not $gpus) -}}
{{- fail (printf "config.%s.device is %s, but %s.resources.limits has no GPU, such as nvidia.com/gpu: 1" $name $device $name) -}}
{{- end -}}
{{- if and $gpus (eq "cpu" $device) (not (and (eq $name "generation") (eq (dig "generation" "engine" "" $values.config | toString) "vllm"))) -}}
{{- fail (printf "%s.resources.limits has %v GPUs, but config.%s.device is cpu: they would stand idle" $name $gpus $name) -}}
{{- end -}}
{{- $parallel := ternary (dig "generation" "vllm" "tensor_parallel_size" 1 $values.config) 1 (eq $name "generation") -}}
{{- if and (hasPrefix "cuda" $device) (lt (int $gpus) (int $parallel)) -}}
{{- fail (printf "config.generation.vllm.tensor_parallel_size is %v, but generation.resources.limits has %v GPUs" $parallel $gpus) -}}
{{- end -}}
{{- end -}}
{{- if and (eq (dig "generation" "engine" "" $values.config | toString) "vllm") (eq $values.generation.image.repository "nouscoder-generation") (not $values.generation.image.digest) -}}
{{- fail "config.generation.engine is vllm, but generation.image.repository is nouscoder-generation, which has no vLLM: set it to nouscoder-vllm" -}}
{{- end -}}
{{- end -}}
{{- end -}}
