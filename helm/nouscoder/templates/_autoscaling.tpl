{{/* What the verifier's scaling follows. A query is for Prometheus; `type` is that of a metric target (autoscaling/v2). */}}

{{- define "nouscoder.autoscaled" -}}
{{- if ne .Values.verifier.autoscaling.kind "none" }}true{{ end }}
{{- end -}}

{{/* What a pod leases: twice its concurrent submissions. */}}
{{- define "nouscoder.workPerPod" -}}
{{- $sandbox := .Values.verifier.sandbox -}}
{{- $slots := ternary $sandbox.modal.slots $sandbox.pool.size (eq (include "nouscoder.sandboxBackend" .) "modal") -}}
{{- .Values.verifier.autoscaling.workPerPod | default (mul 2 $slots) -}}
{{- end -}}

{{/* The metrics as a YAML list. The oldest rollout counts only while nobody holds some of them, because a rollout that is
     being graded may be old without need for another pod. */}}
{{- define "nouscoder.autoscalingMetrics" -}}
{{- $scaling := .Values.verifier.autoscaling -}}
{{- $own := printf "namespace=%q,app_kubernetes_io_instance=%q" .Release.Namespace .Release.Name -}}
{{- $lag := printf "sum(nouscoder_broker_stream_lag{%s,stream=\"grading\"})" $own -}}
{{- if .Values.loop.enabled }}
- name: nouscoder_grading_rollouts
  query: {{ printf "%s + sum(nouscoder_broker_pending_leases{%s,stream=\"grading\"})" $lag $own | quote }}
  type: AverageValue
  target: {{ include "nouscoder.workPerPod" . }}
  fallback: true
- name: nouscoder_grading_rollouts_oldest_seconds
  query: {{ printf "max(nouscoder_broker_oldest_age_seconds{%s,stream=\"grading\"}) * (%s > bool 0)" $own $lag | quote }}
  type: Value
  target: {{ $scaling.oldestSeconds }}
  fallback: true
{{- end }}
- name: nouscoder_grading_submissions
  query: {{ printf "sum(nouscoder_verifier_queue_depth{%s}) + sum(nouscoder_verifier_sandboxes{%s,state=\"busy\"})" $own $own | quote }}
  type: AverageValue
  target: {{ include "nouscoder.workPerPod" . }}
- name: nouscoder_grading_submissions_oldest_seconds
  query: {{ printf "max(nouscoder_verifier_queue_oldest_age_seconds{%s})" $own | quote }}
  type: Value
  target: {{ $scaling.oldestSeconds }}
{{- if and .Values.loop.enabled (eq (int $scaling.min) 0) }}
{{- /* An evaluation samples for seconds, between two scrapes, and then waits for a verifier: no gauge shows that. So an
     unfinished run with a generator that has a policy keeps one. After its end the tokens sampled count. */}}
{{- $begun := printf "(max(nouscoder_generation_policy_version{%s}) >= bool 0) * (max(nouscoder_broker_run_finished{%s}) == bool 0)" $own $own }}
{{- $sampled := printf "max(increase(nouscoder_generation_tokens_total{%s}[2m])) > bool 0" $own }}
- name: nouscoder_run_in_progress
  query: {{ printf "((%s or vector(0)) + (%s or vector(0))) > bool 0" $begun $sampled | quote }}
  type: AverageValue
  target: 1
{{- end }}
{{- end -}}

{{/* Pods are added at once, and taken away when there was less work for cooldownSeconds. */}}
{{- define "nouscoder.autoscalingBehavior" -}}
scaleUp:
  stabilizationWindowSeconds: 0
scaleDown:
  stabilizationWindowSeconds: {{ .Values.verifier.autoscaling.cooldownSeconds }}
{{- end -}}

{{/* Checks that the schema cannot express. */}}
{{- define "nouscoder.autoscalingGuards" -}}
{{- $scaling := .Values.verifier.autoscaling -}}
{{- $pool := .Values.verifier.sandbox.pool -}}
{{- $runners := eq (include "nouscoder.usesRunners" .) "true" -}}
{{- if include "nouscoder.autoscaled" . -}}
{{- if gt (int $scaling.min) (int $scaling.max) -}}
{{- fail (printf "verifier.autoscaling.min is %v and verifier.autoscaling.max %v: min must not be above max" $scaling.min $scaling.max) -}}
{{- end -}}
{{- if and (eq (int $scaling.min) 0) (not .Values.loop.enabled) -}}
{{- fail "verifier.autoscaling.min is 0 and loop.enabled false: nothing would wake a verifier, because a request to the grading API reaches nobody; take 1" -}}
{{- end -}}
{{- if and (eq (int $scaling.min) 0) (eq $scaling.kind "hpa") -}}
{{- fail "verifier.autoscaling.min is 0 with kind hpa: a HorizontalPodAutoscaler does not scale to zero and back; take 1, or kind keda" -}}
{{- end -}}
{{- if and (eq $scaling.kind "keda") (not $scaling.keda.prometheus) -}}
{{- fail "verifier.autoscaling.kind keda needs verifier.autoscaling.keda.prometheus: the address of Prometheus, as KEDA reaches it" -}}
{{- end -}}
{{- if and (eq (include "nouscoder.sandboxBackend" .) "local") (not $scaling.workPerPod) -}}
{{- fail "verifier.autoscaling.workPerPod must be set with backend local: the cores of a pod are not known" -}}
{{- end -}}
{{- if and $runners (not $pool.managed) -}}
{{- fail (printf "verifier.autoscaling.kind is %s with verifier.sandbox.pool.managed false: the number of runners in a Deployment does not follow that of the verifier's pods" $scaling.kind) -}}
{{- end -}}
{{- end -}}
{{- if not (kindIs "invalid" $pool.min) -}}
{{- if not (and $runners $pool.managed) -}}
{{- fail "verifier.sandbox.pool.min needs backend gvisor or userns, and verifier.sandbox.pool.managed: only then the verifier makes and ends its runners" -}}
{{- end -}}
{{- if gt (int $pool.min) (int $pool.size) -}}
{{- fail (printf "verifier.sandbox.pool.min is %v, above verifier.sandbox.pool.size %v" $pool.min $pool.size) -}}
{{- end -}}
{{- end -}}
{{- end -}}
