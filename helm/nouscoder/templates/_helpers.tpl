{{/* Names and labels. Every helper takes the root context, or the dict that its comment names. */}}

{{- define "nouscoder.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* Prefix of all names; short enough for the longest suffix. */}}
{{- define "nouscoder.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "nouscoder.broker.fullname" -}}{{ include "nouscoder.fullname" . }}-broker{{- end -}}
{{- define "nouscoder.verifier.fullname" -}}{{ include "nouscoder.fullname" . }}-verifier{{- end -}}
{{- define "nouscoder.generation.fullname" -}}{{ include "nouscoder.fullname" . }}-generation{{- end -}}
{{- define "nouscoder.learner-worker.fullname" -}}{{ include "nouscoder.fullname" . }}-learner-worker{{- end -}}
{{- define "nouscoder.learner.fullname" -}}{{ include "nouscoder.fullname" . }}-learner{{- end -}}
{{- define "nouscoder.redis.fullname" -}}{{ include "nouscoder.fullname" . }}-redis{{- end -}}
{{- define "nouscoder.sandbox.fullname" -}}{{ include "nouscoder.fullname" . }}-sandbox{{- end -}}
{{- define "nouscoder.test.fullname" -}}{{ include "nouscoder.fullname" . }}-test{{- end -}}

{{- define "nouscoder.selectorLabels" -}}
app.kubernetes.io/name: {{ include "nouscoder.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* dict root component */}}
{{- define "nouscoder.componentSelectorLabels" -}}
{{ include "nouscoder.selectorLabels" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Labels of a resource: dict root component */}}
{{- define "nouscoder.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "nouscoder.componentSelectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: nouscoder
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels of an object that is outside of the release's namespace, or may be: it stays when that namespace is deleted. */}}
{{- define "nouscoder.labelsOutside" -}}
{{ include "nouscoder.labels" . }}
nouscoder/release-namespace: {{ .root.Release.Namespace }}
{{- end -}}

{{/* Labels and annotations of the object that makes a component's pods: dict root component values */}}
{{- define "nouscoder.workloadMetadata" -}}
labels:
  {{- include "nouscoder.labels" . | nindent 2 }}
  {{- with .values.workloadLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .values.workloadAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Labels of a pod: dict root component values */}}
{{- define "nouscoder.podLabels" -}}
{{ include "nouscoder.componentSelectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: nouscoder
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- with .values.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Image of a component, by its digest if one is set: dict root image, and a suffix of the tag. Redis' image has a registry and
a tag of its own. */}}
{{- define "nouscoder.image" -}}
{{ (.root.Values.global).imageRegistry | default .image.registry | default .root.Values.image.registry }}/{{ .image.repository }}
{{- if .image.digest }}@{{ .image.digest }}{{ else }}:{{ .image.tag | default .root.Values.image.tag | default .root.Chart.AppVersion }}{{ with .suffix }}-{{ . }}{{ end }}{{ end }}
{{- end -}}

{{/* The address of a service inside the cluster: dict root component port */}}
{{- define "nouscoder.address" -}}
{{ include "nouscoder.fullname" .root }}-{{ .component }}.{{ .root.Release.Namespace }}.svc:{{ .port }}
{{- end -}}

{{/* The host that services listen on. In Linux [::] also takes connections of IPv4. */}}
{{- define "nouscoder.listen" -}}
{{ ternary "0.0.0.0" "[::]" (eq .Values.ipFamily "IPv4") }}
{{- end -}}

{{/* Families of a Service: nothing with IPv4, which leaves them to the cluster. */}}
{{- define "nouscoder.serviceFamilies" -}}
{{- if eq .Values.ipFamily "IPv6" -}}
ipFamilies: [IPv6]
{{- else if eq .Values.ipFamily "Dual" -}}
ipFamilyPolicy: PreferDualStack
{{- end -}}
{{- end -}}

{{/* The same of the metrics; the verifier's have a Service of their own: dict root component */}}
{{- define "nouscoder.metricsAddress" -}}
{{- $service := ternary "verifier-metrics" .component (eq .component "verifier") -}}
{{ include "nouscoder.address" (dict "root" .root "component" $service "port" (include "nouscoder.port" (list .root "metrics"))) }}
{{- end -}}

{{/* One port of the list below: list root name */}}
{{- define "nouscoder.port" -}}
{{ get (include "nouscoder.ports" (index . 0) | fromJson) (index . 1) }}
{{- end -}}

{{/* All port numbers, as JSON. */}}
{{- define "nouscoder.ports" -}}
{{ dict "verifier" 50051 "broker" 50052 "generation" 50053 "learner" 50054 "http" 8080 "openai" 8000 "pages" 8090 "metrics" 9090 "health" 8086 "redis" 6379 "exporter" 9121 "ranks" 29500 "runner" 7070 | toJson }}
{{- end -}}

{{/* The name of an object in a namespace for monitoring, which several releases may share: dict root namespace */}}
{{- define "nouscoder.monitoringName" -}}
{{- $name := include "nouscoder.fullname" .root -}}
{{- if has .namespace (list "" .root.Release.Namespace) -}}{{ $name }}{{- else -}}{{ .root.Release.Namespace }}-{{ $name }}{{- end -}}
{{- end -}}

{{/* The spec of a claim, of the values `persistence`. */}}
{{- define "nouscoder.claimSpec" -}}
spec:
  accessModes: {{ toJson .accessModes }}
  {{- with .storageClass }}
  storageClassName: {{ . | quote }}
  {{- end }}
  resources:
    requests:
      storage: {{ .size }}
{{- end -}}
