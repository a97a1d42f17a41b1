{{/* The sandbox backend, and the pod of a runner. */}}

{{/* "true" if the verifier makes containers of Modal: as its backend, or for spill-over. */}}
{{- define "nouscoder.usesModal" -}}
{{- $spillOver := dig "verifier" "sandbox" "spill_over" "backend" "" .Values.config -}}
{{- if or (eq (include "nouscoder.sandboxBackend" .) "modal") (eq $spillOver "modal") -}}true{{- end -}}
{{- end -}}

{{/* Environment of a verifier that makes containers of Modal. */}}
{{- define "nouscoder.modalEnv" -}}
{{- $why := "containers of Modal need verifier.sandbox.modal.existingSecret: the Secret with the keys MODAL_TOKEN_ID and MODAL_TOKEN_SECRET" -}}
{{- $secret := required $why .Values.verifier.sandbox.modal.existingSecret -}}
{{- range $key := list "MODAL_TOKEN_ID" "MODAL_TOKEN_SECRET" }}
- name: {{ $key }}
  valueFrom: {secretKeyRef: {name: {{ $secret }}, key: {{ $key }}}}
{{- end }}
{{- end -}}

{{/* gvisor, local or modal. Without a cluster (helm template, helm lint) an empty value is gvisor. */}}
{{- define "nouscoder.sandboxBackend" -}}
{{- $sandbox := .Values.verifier.sandbox -}}
{{- if $sandbox.backend -}}
{{- $sandbox.backend -}}
{{- else -}}
{{- $classes := lookup "node.k8s.io/v1" "RuntimeClass" "" "" -}}
{{- $names := list -}}
{{- range $classes.items | default list -}}{{- $names = append $names .metadata.name -}}{{- end -}}
{{- if and $classes (not (has $sandbox.runtimeClassName $names)) -}}
{{- fail (printf "this cluster has no RuntimeClass %q (verifier.sandbox.runtimeClassName), so candidates cannot run in gVisor. The remaining isolation is weaker: namespaces, seccomp and limits on the node's own kernel, inside a privileged verifier pod. Install gVisor, or accept the weaker isolation with --set verifier.sandbox.backend=local" $sandbox.runtimeClassName) -}}
{{- end -}}
gvisor
{{- end -}}
{{- end -}}

{{/* The privileges of a runner. They act only inside gVisor: its kernel makes the namespaces of each submission, and
     candidates run as another user than the harness. On the node the sandbox has none of them. */}}
{{- define "nouscoder.runnerPodSecurityContext" -}}
runAsUser: 0
runAsGroup: 0
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "nouscoder.runnerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  add: [SYS_ADMIN, SETUID, SETGID, SETPCAP, KILL, CHOWN, DAC_OVERRIDE, FOWNER]
{{- end -}}

{{/* The verifier. With backend local it makes namespaces itself, which the restricted standard forbids: dict root values */}}
{{- define "nouscoder.gatewayPodSecurityContext" -}}
{{- if eq (include "nouscoder.sandboxBackend" .root) "local" -}}
runAsNonRoot: false
runAsUser: 0
runAsGroup: 0
seccompProfile:
  type: Unconfined
{{- else -}}
{{ include "nouscoder.podSecurityContext" . }}
{{- end -}}
{{- end -}}

{{- define "nouscoder.gatewaySecurityContext" -}}
{{- if eq (include "nouscoder.sandboxBackend" .root) "local" -}}
privileged: true
readOnlyRootFilesystem: true
{{- else -}}
{{ include "nouscoder.securityContext" . }}
{{- end -}}
{{- end -}}

{{/* metadata and spec of a runner pod, for the verifier's template and for the Deployment. */}}
{{- define "nouscoder.runnerPod" -}}
{{- $sandbox := .Values.verifier.sandbox -}}
{{- $pool := $sandbox.pool -}}
metadata:
  labels:
    {{- include "nouscoder.podLabels" (dict "root" . "component" "sandbox" "values" $pool) | nindent 4 }}
  {{- with $pool.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  runtimeClassName: {{ $sandbox.runtimeClassName | quote }}
  {{- include "nouscoder.podStart" (dict "root" . "component" "sandbox" "values" $pool) | nindent 2 }}
  restartPolicy: Always
  terminationGracePeriodSeconds: 1
  # A runner resolves no names.
  dnsPolicy: None
  dnsConfig:
    nameservers: ["127.0.0.1"]
  securityContext:
    {{- include "nouscoder.runnerPodSecurityContext" . | nindent 4 }}
  containers:
    - name: runner
      image: {{ include "nouscoder.image" (dict "root" . "image" $sandbox.image) }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      command: [python3, -I, -S, /opt/nouscoder/runner/__main__.py]
      env:
        - name: NOUSCODER_RUNNER_KEY
          valueFrom:
            secretKeyRef:
              name: {{ include "nouscoder.poolSecret" . }}
              key: key
      ports:
        - name: runner
          containerPort: {{ (include "nouscoder.ports" . | fromJson).runner }}
      readinessProbe:
        tcpSocket: {port: runner}
        periodSeconds: 2
        timeoutSeconds: 2
      resources:
        {{- toYaml $pool.resources | nindent 8 }}
      securityContext:
        {{- include "nouscoder.runnerSecurityContext" . | nindent 8 }}
      volumeMounts:
        - name: tmp
          mountPath: /tmp
  volumes:
    - name: tmp
      emptyDir:
        medium: Memory
        sizeLimit: {{ $pool.tmpSize }}
{{- end -}}
