{{/* Parts that all pods share. */}}

{{/* The start of a pod's spec: dict root component values */}}
{{- define "nouscoder.podStart" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .values.serviceAccount }}
serviceAccountName: {{ include "nouscoder.serviceAccountName" $ }}
{{- end }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .values.schedulerName }}
schedulerName: {{ . | quote }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- include "nouscoder.topologySpread" $ | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The constraints of the values; one without a labelSelector gets that of its component: dict root component values */}}
{{- define "nouscoder.topologySpread" -}}
{{- $own := dict "matchLabels" (include "nouscoder.componentSelectorLabels" . | fromYaml) -}}
{{- $constraints := list -}}
{{- range .values.topologySpreadConstraints -}}
{{- $constraints = append $constraints (ternary . (merge (dict "labelSelector" $own) .) (hasKey . "labelSelector")) -}}
{{- end -}}
{{- toYaml $constraints -}}
{{- end -}}

{{/* The account of a pod. It is always named: after an upgrade that deletes an account, Kubernetes would otherwise keep
     its name in the pod, which then could not start: dict root component values */}}
{{- define "nouscoder.serviceAccountName" -}}
{{- $own := printf "%s-%s" (include "nouscoder.fullname" .root) .component -}}
{{- .values.serviceAccount.name | default (ternary $own "default" .values.serviceAccount.create) -}}
{{- end -}}

{{/* The account that the chart makes for a component: dict root component values */}}
{{- define "nouscoder.serviceAccount" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ include "nouscoder.serviceAccountName" . }}
  labels:
    {{- include "nouscoder.labels" . | nindent 4 }}
  {{- with .values.serviceAccount.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
{{- end -}}

{{/* The security contexts of all pods, overridden by those of the component: dict root values */}}
{{- define "nouscoder.podSecurityContext" -}}
{{- mustMergeOverwrite (deepCopy .root.Values.podSecurityContext) (.values.podSecurityContext | default dict) | toYaml -}}
{{- end -}}

{{- define "nouscoder.securityContext" -}}
{{- mustMergeOverwrite (deepCopy .root.Values.securityContext) (.values.securityContext | default dict) | toYaml -}}
{{- end -}}

{{/* Annotations of a pod with a metrics port: dict root component values */}}
{{- define "nouscoder.podAnnotations" -}}
{{- $port := (include "nouscoder.ports" .root | fromJson).metrics -}}
{{- $own := dict "checksum/config" (include "nouscoder.config.read" . | sha256sum) -}}
{{- include "nouscoder.annotations" (merge (dict "own" (merge $own (include "nouscoder.scraped" $port | fromYaml))) .) -}}
{{- end -}}

{{- define "nouscoder.scraped" -}}
prometheus.io/scrape: "true"
prometheus.io/port: {{ . | quote }}
prometheus.io/path: /metrics
{{- end -}}

{{/* The annotations `own` of a pod, overridden by those of the values. The cluster autoscaler may evict a pod although it
     has an emptyDir; only of the learner it costs work, the batch in training: dict component values own */}}
{{- define "nouscoder.annotations" -}}
{{- $evict := dict "cluster-autoscaler.kubernetes.io/safe-to-evict" (ternary "false" "true" (hasPrefix "learner" .component)) -}}
{{- mustMergeOverwrite $evict (.own | default dict) (.values.podAnnotations | default dict) | toYaml -}}
{{- end -}}

{{/* Environment of a container: dict values; `own` are the variables that the chart sets, as YAML. */}}
{{- define "nouscoder.env" -}}
env:
{{- with .own }}
{{ . | trim | indent 2 }}
{{- end }}
  - name: HOME
    value: /tmp
{{- with include "nouscoder.extraEnv" .values.extraEnv | trim }}
{{ . | indent 2 }}
{{- end }}
{{- include "nouscoder.envFrom" . }}
{{- end -}}

{{/* The variables of the values, as a list. */}}
{{- define "nouscoder.extraEnv" -}}
{{- range $name, $value := . }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}

{{/* The sources of variables of the values: dict values */}}
{{- define "nouscoder.envFrom" -}}
{{- with .values.extraEnvFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Further volumes, mounts and containers of the values: dict values */}}
{{- define "nouscoder.extraVolumes" -}}
{{- with .values.extraVolumes }}{{ toYaml . }}{{ end -}}
{{- end -}}
{{- define "nouscoder.extraMounts" -}}
{{- with .values.extraVolumeMounts }}{{ toYaml . }}{{ end -}}
{{- end -}}
{{- define "nouscoder.sidecars" -}}
{{- with .values.sidecars }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{/* Probes by grpc.health.v1 on the plaintext port, because the kubelet shows no certificate: dict root values */}}
{{- define "nouscoder.probes" -}}
{{- $health := (include "nouscoder.ports" .root | fromJson).health -}}
{{- $probes := .values.probes -}}
startupProbe:
  grpc: {port: {{ $health }}, service: liveness}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: {{ ceil (divf $probes.startupSeconds 10) }}
readinessProbe:
  grpc: {port: {{ $health }}, service: readiness}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ ceil (divf $probes.readinessSeconds 5) }}
livenessProbe:
  grpc: {port: {{ $health }}, service: liveness}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: {{ ceil (divf $probes.livenessSeconds 10) }}
{{- end -}}

{{/* Delays SIGTERM until no Service sends new calls. */}}
{{- define "nouscoder.lifecycle" -}}
lifecycle:
  preStop:
    exec:
      command: [sleep, "3"]
{{- end -}}

{{/* Everything below /etc/nouscoder as one volume: dict root component */}}
{{- define "nouscoder.settingsVolume" -}}
{{- $root := .root -}}
- name: settings
  projected:
    defaultMode: 0440
    sources:
      - configMap:
          name: {{ include "nouscoder.fullname" $root }}-config
          items: [{key: config.json, path: config.json}]
      {{- if eq .component "broker" }}
      - secret:
          name: {{ include "nouscoder.redisSecret" $root }}
          items:
            - {key: {{ include "nouscoder.redisSecretKey" $root }}, path: redis/url}
            {{- if and $root.Values.redis.external.enabled $root.Values.redis.external.caKey }}
            - {key: {{ $root.Values.redis.external.caKey }}, path: redis/ca.crt}
            {{- end }}
      {{- if include "nouscoder.ownRedisTls" $root }}
      - secret:
          name: {{ include "nouscoder.tlsSecret" (dict "root" $root "component" "redis") }}
          items: [{key: ca.crt, path: redis/ca.crt}]
      {{- end }}
      {{- end }}
      {{- if or (eq .component "learner") (and (eq .component "generation") (include "nouscoder.usesTools" $root)) }}
      {{- /* The token that evaluations and environments send to the verifier. */}}
      {{- with include "nouscoder.tokensSecret" $root }}
      - secret:
          name: {{ . }}
          items: [{key: token, path: tokens/token}]
      {{- end }}
      {{- end }}
      {{- if eq .component "generation" }}
      {{- with include "nouscoder.openaiSecret" $root }}
      - secret:
          name: {{ . }}
          items: [{key: tokens, path: openai/tokens}]
      {{- end }}
      {{- end }}
      {{- if eq .component "verifier" }}
      {{- with include "nouscoder.tokensSecret" $root }}
      - secret:
          name: {{ . }}
          items: [{key: tokens, path: tokens/tokens}]
      {{- end }}
      {{- if include "nouscoder.usesRunners" $root }}
      - secret:
          name: {{ include "nouscoder.poolSecret" $root }}
          items: [{key: key, path: pool/key}]
      {{- if $root.Values.verifier.sandbox.pool.managed }}
      - configMap:
          name: {{ include "nouscoder.sandbox.fullname" $root }}
          items: [{key: {{ include "nouscoder.runnerFile" $root }}, path: pool/{{ include "nouscoder.runnerFile" $root }}}]
      {{- end }}
      {{- end }}
      {{- end }}
      {{- if $root.Values.tls.enabled }}
      - secret:
          name: {{ include "nouscoder.tlsSecret" . }}
          items:
            - {key: tls.crt, path: tls/tls.crt}
            - {key: tls.key, path: tls/tls.key}
            - {key: ca.crt, path: tls/ca.crt}
      {{- end }}
{{- end -}}

{{/* The PodDisruptionBudget of a component: dict root component, and namespace if it is not the release's */}}
{{- define "nouscoder.podDisruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "nouscoder.fullname" .root }}-{{ .component }}
  {{- with .namespace }}
  namespace: {{ . }}
  {{- end }}
  labels:
    {{- include "nouscoder.labels" . | nindent 4 }}
spec:
  maxUnavailable: {{ .root.Values.podDisruptionBudget.maxUnavailable }}
  selector:
    matchLabels:
      {{- include "nouscoder.componentSelectorLabels" . | nindent 6 }}
{{- end -}}

{{/* The start of a container, up to its command: dict root name image */}}
{{- define "nouscoder.containerStart" -}}
name: {{ .name }}
image: {{ include "nouscoder.image" . }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
{{- end -}}

{{/* Command that serves a component, listening on all addresses: dict root component */}}
{{- define "nouscoder.serve" -}}
{{- $port := include "nouscoder.ports" .root | fromJson -}}
command: [nouscoder]
args:
  - serve
  - {{ .component }}
  - --config=/etc/nouscoder/config.json
  - --grpc={{ include "nouscoder.listen" .root }}:{{ get $port .component }}
  - --metrics={{ include "nouscoder.listen" .root }}:{{ $port.metrics }}
{{- end -}}

{{/* Ports of a service's container: dict root component */}}
{{- define "nouscoder.containerPorts" -}}
{{- $port := include "nouscoder.ports" .root | fromJson -}}
- {name: grpc, containerPort: {{ get $port .component }}}
- {name: metrics, containerPort: {{ $port.metrics }}}
- {name: health, containerPort: {{ $port.health }}}
{{- end -}}
