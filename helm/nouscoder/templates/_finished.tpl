{{/* A run that is finished, and a release that is suspended. */}}

{{/* Replicas of a workload, 0 while the release is suspended: list root number */}}
{{- define "nouscoder.replicas" -}}
{{ ternary 0 (index . 1 | int) (index . 0).Values.suspend }}
{{- end -}}

{{- define "nouscoder.releases" -}}
{{- if and .Values.loop.enabled (eq .Values.whenFinished "release") }}true{{ end }}
{{- end -}}

{{/* The objects whose pods have the GPUs, as a JSON list, the learner's own as the last one. The learner's pod deletes them,
     and an upgrade makes them again. Helm 4 would not change replicas that somebody else has set. */}}
{{- define "nouscoder.released" -}}
{{- $objects := list (dict "group" "apps" "version" "v1" "resource" "deployments" "name" (include "nouscoder.generation.fullname" .)) -}}
{{- $learner := include "nouscoder.learner.fullname" . -}}
{{- $sets := dict "group" "apps" "version" "v1" "resource" "statefulsets" -}}
{{- if eq .Values.learner.workload "jobSet" -}}
{{- $objects = append $objects (dict "group" "jobset.x-k8s.io" "version" "v1alpha2" "resource" "jobsets" "name" $learner) -}}
{{- else if eq .Values.learner.workload "leaderWorkerSet" -}}
{{- $objects = append $objects (dict "group" "leaderworkerset.x-k8s.io" "version" "v1" "resource" "leaderworkersets" "name" (printf "%s-group" $learner)) -}}
{{- else -}}
{{- if gt (int .Values.learner.pods) 1 -}}
{{- $objects = append $objects (merge (dict "name" (include "nouscoder.learner-worker.fullname" .)) $sets) -}}
{{- end -}}
{{- $objects = append $objects (merge (dict "name" $learner) $sets) -}}
{{- end -}}
{{- toJson $objects -}}
{{- end -}}

{{/* The GPUs of these objects: list root */}}
{{- define "nouscoder.releasedGpus" -}}
{{- $gpus := 0 -}}
{{- range list (list .Values.generation .Values.generation.replicas) (list .Values.learner .Values.learner.pods) -}}
{{- $pods := index . 1 -}}
{{- range $resource, $number := (index . 0).resources.limits -}}
{{- if hasSuffix "/gpu" $resource -}}{{- $gpus = add $gpus (mul $pods $number) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- $gpus -}}
{{- end -}}

{{/* The names that the Deployment of the pages may have, as a JSON list. Once the learner's pod has started it, its
     replicas belong to that pod, so the next upgrade makes the other one, and Helm deletes this one. */}}
{{- define "nouscoder.pagesNames" -}}
{{- $name := printf "%s-pages" (include "nouscoder.fullname" .) -}}
{{- list $name (printf "%s-again" $name) | toJson -}}
{{- end -}}

{{/* config.run.release, as JSON. */}}
{{- define "nouscoder.releaseConfig" -}}
{{- $namespace := .Release.Namespace -}}
{{- $delete := list -}}
{{- range include "nouscoder.released" . | fromJsonArray -}}
{{- $delete = append $delete (printf "/apis/%s/%s/namespaces/%s/%s/%s" .group .version $namespace .resource .name) -}}
{{- end -}}
{{- $start := list -}}
{{- range include "nouscoder.pagesNames" . | fromJsonArray -}}
{{- $start = append $start (printf "/apis/apps/v1/namespaces/%s/deployments/%s" $namespace .) -}}
{{- end -}}
{{- dict "delete" $delete "start" $start "after_s" .Values.ttlSeconds "gpus" (include "nouscoder.releasedGpus" . | int) | toJson -}}
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
