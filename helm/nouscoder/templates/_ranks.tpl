{{/* The ranks of the learner: learner/parallel/ranks.py has the environment variables by which a process knows its own. */}}

{{/* Command of a pod's ranks. torchrun does not start a lost rank again: the pod ends, and its controller starts it. */}}
{{- define "nouscoder.learnerServe" -}}
{{- $learner := .Values.learner -}}
{{- $port := include "nouscoder.ports" . | fromJson -}}
{{- if eq (int $learner.ranksPerPod) 1 -}}
{{- include "nouscoder.serve" (dict "root" . "component" "learner") -}}
{{- else -}}
command: [python3, -m, torch.distributed.run]
args:
  - --nproc-per-node={{ $learner.ranksPerPod }}
  {{- if eq (int $learner.pods) 1 }}
  - --standalone
  {{- else }}
  {{- $isGroup := eq $learner.workload "leaderWorkerSet" }}
  - --nnodes={{ $learner.pods }}
  - --node-rank=$({{ ternary "LWS_WORKER_INDEX" "NODE_RANK" $isGroup }})
  - --master-addr=$({{ ternary "LWS_LEADER_ADDRESS" "MASTER_ADDR" $isGroup }})
  - --master-port={{ $port.ranks }}
  {{- end }}
  - -m
  - nouscoder
  {{- range (include "nouscoder.serve" (dict "root" . "component" "learner") | fromYaml).args }}
  - {{ . }}
  {{- end }}
{{- end -}}
{{- end -}}

{{/* Variables of the ranks of a pod. A LeaderWorkerSet sets its own. dict root, and number of the first pod */}}
{{- define "nouscoder.rankEnv" -}}
{{- $learner := .root.Values.learner -}}
{{- if and (gt (int $learner.pods) 1) (ne $learner.workload "leaderWorkerSet") -}}
{{- $label := ternary "jobset.sigs.k8s.io/job-global-index" "apps.kubernetes.io/pod-index" (eq $learner.workload "jobSet") -}}
- name: {{ ternary "RANK" "NODE_RANK" (eq (int $learner.ranksPerPod) 1) }}
  {{- if .number }}
  value: {{ .number | quote }}
  {{- else }}
  valueFrom: {fieldRef: {fieldPath: "metadata.labels['{{ $label }}']"}}
  {{- end }}
- name: MASTER_ADDR
  value: {{ include "nouscoder.fullname" .root }}-learner-ranks.{{ .root.Release.Namespace }}.svc
{{- if eq (int $learner.ranksPerPod) 1 }}
- name: MASTER_PORT
  value: {{ (include "nouscoder.ports" .root | fromJson).ranks | quote }}
- name: WORLD_SIZE
  value: {{ $learner.pods | quote }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* Resources of a container with ranks: with the devices of the network. */}}
{{- define "nouscoder.rankResources" -}}
{{- $resources := deepCopy .Values.learner.resources -}}
{{- with .Values.learner.rdma.resource -}}
{{- range list "requests" "limits" -}}
{{- $of := get $resources . | default dict -}}
{{- $_ := set $of $.Values.learner.rdma.resource $.Values.learner.rdma.count -}}
{{- $_ := set $resources . $of -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Security context of a container with ranks: RDMA locks memory. */}}
{{- define "nouscoder.rankSecurityContext" -}}
{{- $context := include "nouscoder.securityContext" (dict "root" . "values" .Values.learner) | fromYaml -}}
{{- if and .Values.learner.rdma.resource .Values.learner.rdma.ipcLock -}}
{{- $capabilities := $context.capabilities | default dict -}}
{{- $_ := set $capabilities "add" (append ($capabilities.add | default list) "IPC_LOCK" | uniq) -}}
{{- $_ := set $context "capabilities" $capabilities -}}
{{- end -}}
{{- toYaml $context -}}
{{- end -}}

{{/* A rule for all ports between the pods of the learner, because ranks choose theirs: dict root direction(from|to) */}}
{{- define "nouscoder.ranksArrow" -}}
- {{ .direction }}:
    {{- include "nouscoder.peers" (dict "root" .root "components" (list "learner" "learner-worker")) | trim | nindent 4 }}
{{- end -}}

{{/* Fails if the values of the learner do not fit together, or the cluster lacks the kind of workload. */}}
{{- define "nouscoder.learnerGuards" -}}
{{- $learner := .Values.learner -}}
{{- $several := gt (int $learner.pods) 1 -}}
{{- $p := $learner.persistence -}}
{{- if and $several (not $p.existingClaim) (not (has "ReadWriteMany" $p.accessModes)) -}}
{{- fail (printf "learner.pods is %v: all of them mount the run folders, so learner.persistence.accessModes must be [ReadWriteMany], or learner.persistence.existingClaim name such a volume" $learner.pods) -}}
{{- end -}}
{{- range $from := list "requests" "limits" -}}
{{- $gpus := get (get $learner.resources $from | default dict) "nvidia.com/gpu" -}}
{{- if and $gpus (ne (int $gpus) (int $learner.ranksPerPod)) -}}
{{- fail (printf "learner.ranksPerPod is %v, but learner.resources.%s has %v nvidia.com/gpu: each rank has one GPU" $learner.ranksPerPod $from $gpus) -}}
{{- end -}}
{{- end -}}
{{- $parallel := dig "learner" "context_parallel" 1 .Values.config | default 1 -}}
{{- $ranks := mul $learner.pods $learner.ranksPerPod -}}
{{- if mod $ranks (int $parallel) -}}
{{- fail (printf "config.learner.context_parallel is %v, but learner.pods x learner.ranksPerPod are %v ranks, which is no multiple of it" $parallel $ranks) -}}
{{- end -}}
{{- if and $learner.topologyKey (hasKey $learner.affinity "podAffinity") -}}
{{- fail "learner.topologyKey sets learner.affinity.podAffinity: give one of them" -}}
{{- end -}}
{{- $apis := .Capabilities.APIVersions -}}
{{- range $workload, $kind := dict "leaderWorkerSet" "leaderworkerset.x-k8s.io/v1/LeaderWorkerSet" "jobSet" "jobset.x-k8s.io/v1alpha2/JobSet" -}}
{{- if and (eq $learner.workload $workload) ($apis.Has "v1/Secret") (not ($apis.Has $kind)) -}}
{{- fail (printf "learner.workload is %s, but this cluster has no %s: install its operator, or take statefulset" $workload $kind) -}}
{{- end -}}
{{- end -}}
{{- end -}}
