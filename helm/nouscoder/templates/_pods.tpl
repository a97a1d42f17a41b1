{{/* Parts that all pods share. */}}

{{/* The start of a pod's spec: dict root values */}}
{{- define "nouscoder.podStart" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . | quote }}
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
{{- end -}}

{{/* The restricted standard, and the images' user. */}}
{{- define "nouscoder.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "nouscoder.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Annotations of a pod with a metrics port: dict root values */}}
{{- define "nouscoder.podAnnotations" -}}
checksum/config: {{ include "nouscoder.config.json" .root | sha256sum }}
prometheus.io/scrape: "true"
prometheus.io/port: {{ (include "nouscoder.ports" .root | fromJson).metrics | quote }}
prometheus.io/path: /metrics
{{- with .values.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Environment of a container: dict values */}}
{{- define "nouscoder.env" -}}
- name: HOME
  value: /tmp
{{- range $name, $value := .values.extraEnv }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}

{{/* Liveness and readiness by grpc.health.v1 on the plaintext port, because the kubelet shows no certificate. */}}
{{- define "nouscoder.probes" -}}
{{- $health := (include "nouscoder.ports" . | fromJson).health -}}
readinessProbe:
  grpc: {port: {{ $health }}, service: readiness}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 3
livenessProbe:
  grpc: {port: {{ $health }}, service: liveness}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 6
{{- end -}}

{{/* Up to ten minutes, for services that load models. */}}
{{- define "nouscoder.startupProbe" -}}
startupProbe:
  grpc: {port: {{ (include "nouscoder.ports" . | fromJson).health }}, service: liveness}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 60
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
          items: [{key: {{ include "nouscoder.redisSecretKey" $root }}, path: redis/url}]
      {{- end }}
      {{- if or (eq .component "learner") (and (eq .component "generation") (include "nouscoder.usesTools" $root)) }}
      {{- /* The token that evaluations and environments send to the verifier. */}}
      {{- with include "nouscoder.tokensSecret" $root }}
      - secret:
          name: {{ . }}
          items: [{key: token, path: tokens/token}]
      {{- end }}
      {{- end }}
      {{- if eq .component "verifier" }}
      {{- with include "nouscoder.tokensSecret" $root }}
      - secret:
          name: {{ . }}
          items: [{key: tokens, path: tokens/tokens}]
      {{- end }}
      {{- if eq (include "nouscoder.sandboxBackend" $root) "gvisor" }}
      - secret:
          name: {{ include "nouscoder.sandbox.fullname" $root }}-key
          items: [{key: key, path: pool/key}]
      {{- if $root.Values.verifier.sandbox.pool.managed }}
      - configMap:
          name: {{ include "nouscoder.sandbox.fullname" $root }}
          items: [{key: runner-pod.json, path: pool/runner-pod.json}]
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

{{/* The PodDisruptionBudget of a component: dict root component */}}
{{- define "nouscoder.podDisruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "nouscoder.fullname" .root }}-{{ .component }}
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
  - --grpc=0.0.0.0:{{ get $port .component }}
  - --metrics=0.0.0.0:{{ $port.metrics }}
{{- end -}}

{{/* Ports of a service's container: dict root component */}}
{{- define "nouscoder.containerPorts" -}}
{{- $port := include "nouscoder.ports" .root | fromJson -}}
- {name: grpc, containerPort: {{ get $port .component }}}
- {name: metrics, containerPort: {{ $port.metrics }}}
- {name: health, containerPort: {{ $port.health }}}
{{- end -}}
