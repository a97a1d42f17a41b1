{{/* A run that is finished, and a release that is suspended. */}}

{{/* Replicas of a workload, 0 while the release is suspended: list root number */}}
{{- define "nouscoder.replicas" -}}
{{ ternary 0 (index . 1 | int) (index . 0).Values.suspend }}
{{- end -}}

{{- define "nouscoder.releases" -}}
{{- if and .Values.loop.enabled (eq .Values.whenFinished "release") }}true{{ end }}
{{- end -}}

{{/* The objects whose pods have the GPUs, group/version/resource/name in lines, the learner's own as the last one. The
     learner's pod deletes them, and an upgrade makes them again. Helm 4 would not change replicas that somebody else set. */}}
{{- define "nouscoder.released" -}}
apps/v1/deployments/{{ include "nouscoder.generation.fullname" . }}
{{- if eq .Values.learner.workload "jobSet" }}
jobset.x-k8s.io/v1alpha2/jobsets/{{ include "nouscoder.learner.fullname" . }}
{{- else if eq .Values.learner.workload "leaderWorkerSet" }}
leaderworkerset.x-k8s.io/v1/leaderworkersets/{{ include "nouscoder.learner.fullname" . }}-group
{{- else }}
{{- if gt (int .Values.learner.pods) 1 }}
apps/v1/statefulsets/{{ include "nouscoder.learner-worker.fullname" . }}
{{- end }}
apps/v1/statefulsets/{{ include "nouscoder.learner.fullname" . }}
{{- end }}
{{- end -}}

{{/* Their GPUs. */}}
{{- define "nouscoder.releasedGpus" -}}
{{- $generation := get (.Values.generation.resources.limits | default dict) "nvidia.com/gpu" | default 0 -}}
{{- $learner := get (.Values.learner.resources.limits | default dict) "nvidia.com/gpu" | default 0 -}}
{{- add (mul .Values.generation.replicas $generation) (mul .Values.learner.pods $learner) -}}
{{- end -}}

{{/* The names that the Deployment of the pages may have, as a JSON list. Once the learner's pod has started it, its
     replicas belong to that pod, so the next upgrade makes the other one, and Helm deletes this one. */}}
{{- define "nouscoder.pagesNames" -}}
{{- $name := printf "%s-pages" (include "nouscoder.fullname" .) -}}
{{- list $name (printf "%s-again" $name) | toJson -}}
{{- end -}}

{{/* config.run.release */}}
{{- define "nouscoder.releaseConfig" -}}
{{- $paths := regexReplaceAll "(?m)^(.*/.*)/(.*/.*)$" (include "nouscoder.released" .) (printf "/apis/${1}/namespaces/%s/${2}" .Release.Namespace) -}}
delete: {{ splitList "\n" $paths | toJson }}
start:
  {{- range include "nouscoder.pagesNames" . | fromJsonArray }}
  - /apis/apps/v1/namespaces/{{ $.Release.Namespace }}/deployments/{{ . }}
  {{- end }}
after_s: {{ .Values.ttlSeconds }}
gpus: {{ include "nouscoder.releasedGpus" . }}
{{- end -}}

{{/* The container that evaluates before and after, watches, writes the report, then serves the run's pages:
     dict root component values name image, and `account` to mount the account's token */}}
{{- define "nouscoder.runContainer" -}}
- {{ include "nouscoder.containerStart" (merge (dict "name" "run") .) | nindent 2 | trim }}
  command: [nouscoder]
  args: [train, /etc/nouscoder/config.json]
  {{- include "nouscoder.env" . | nindent 2 }}
  ports:
    - {name: pages, containerPort: {{ include "nouscoder.port" (list .root "pages") }}}
  readinessProbe:
    httpGet: {path: /, port: pages}
    periodSeconds: 5
    timeoutSeconds: 5
  resources:
    {{- toYaml .values.runResources | nindent 4 }}
  securityContext:
    {{- include "nouscoder.securityContext" . | nindent 4 }}
  volumeMounts:
    {{- include "nouscoder.learnerMounts" .root | nindent 4 }}
    {{- if .account }}
    - {name: account, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
    {{- end }}
    {{- with include "nouscoder.extraMounts" . }}{{ . | nindent 4 }}{{ end }}
{{- end -}}
