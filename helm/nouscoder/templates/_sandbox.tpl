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

{{/* gvisor, userns, local or modal. Without a cluster (helm template, helm lint) an empty value is gvisor. */}}
{{- define "nouscoder.sandboxBackend" -}}
{{- $sandbox := .Values.verifier.sandbox -}}
{{- if $sandbox.backend -}}
{{- $sandbox.backend -}}
{{- else -}}
{{- $classes := lookup "node.k8s.io/v1" "RuntimeClass" "" "" -}}
{{- $names := list -}}
{{- range $classes.items | default list -}}{{- $names = append $names .metadata.name -}}{{- end -}}
{{- if and $classes (not (has $sandbox.runtimeClassName $names)) -}}
{{- fail (printf "this cluster has no RuntimeClass %q (verifier.sandbox.runtimeClassName), so candidates cannot run in gVisor. The remaining isolation is weaker: namespaces, seccomp and limits on the node's own kernel. Install gVisor, or accept the weaker isolation: --set verifier.sandbox.backend=userns (pods with users of their own; Kubernetes 1.33 or newer), or --set verifier.sandbox.backend=local (inside a privileged verifier pod)" $sandbox.runtimeClassName) -}}
{{- end -}}
gvisor
{{- end -}}
{{- end -}}

{{/* "true" if candidates run in runner pods. */}}
{{- define "nouscoder.usesRunners" -}}
{{- if has (include "nouscoder.sandboxBackend" .) (list "gvisor" "userns") -}}true{{- end -}}
{{- end -}}

{{/* "true" if the verifiers claim their runners from a SandboxWarmPool of agent-sandbox. */}}
{{- define "nouscoder.claimsRunners" -}}
{{- if and (include "nouscoder.usesRunners" .) (eq .Values.verifier.sandbox.pool.source "agentSandbox") -}}true{{- end -}}
{{- end -}}

{{/* How many runners the SandboxWarmPool keeps: without one, each claim would wait for a pod. */}}
{{- define "nouscoder.warmRunners" -}}
{{- max 1 (mul .Values.verifier.replicas .Values.verifier.sandbox.pool.spares) -}}
{{- end -}}

{{/* The file of the object that a verifier makes for each runner. */}}
{{- define "nouscoder.runnerFile" -}}
{{- ternary "runner-claim.json" "runner-pod.json" (eq (include "nouscoder.claimsRunners" .) "true") -}}
{{- end -}}

{{/* "true" if the runner pods have users of their own on the kernel of their node. */}}
{{- define "nouscoder.usesUserns" -}}
{{- if eq (include "nouscoder.sandboxBackend" .) "userns" -}}true{{- end -}}
{{- end -}}

{{/* The namespace of the runners, which holds nothing else: that of the release is not allowed. */}}
{{- define "nouscoder.sandbox.namespace" -}}
{{- $given := .Values.verifier.sandbox.namespace.name -}}
{{- $release := .Release.Namespace | default "default" -}}
{{- if eq $given $release -}}
{{- fail (printf "verifier.sandbox.namespace.name is %q, the release's own namespace: programs of strangers run in the namespace of the runners, so it must hold nothing else" $given) -}}
{{- end -}}
{{- if or (hasPrefix "kube-" $given) (eq $given "default") -}}
{{- fail (printf "verifier.sandbox.namespace.name is %q, a namespace of the cluster: programs of strangers run in the namespace of the runners, and only they may be in it" $given) -}}
{{- end -}}
{{- $full := include "nouscoder.fullname" . -}}
{{- $own := ternary $release (printf "%s-%s" $release $full) (eq $full .Chart.Name) -}}
{{- $given | default (printf "%s-sandbox" (ternary $own (printf "%s-%s" (trunc 46 $own | trimSuffix "-") (sha256sum $own | trunc 8)) (le (len $own) 55))) -}}
{{- end -}}

{{/* Whether the runners' namespace has a ValidatingAdmissionPolicy: Kubernetes 1.30 or newer, unless refused. Without a
     cluster (helm template) the list of kinds is empty, and the version decides. */}}
{{- define "nouscoder.sandbox.hasPolicy" -}}
{{- $apis := .Capabilities.APIVersions -}}
{{- $known := ternary ($apis.Has "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy") (semverCompare ">=1.30.0-0" .Capabilities.KubeVersion.Version) ($apis.Has "v1/Secret") -}}
{{- $wanted := .Values.verifier.sandbox.admissionPolicy -}}
{{- $isUserns := eq (include "nouscoder.usesUserns" .) "true" -}}
{{- if and $isUserns (or (eq $wanted "never") (not $known)) -}}
{{- fail "verifier.sandbox.backend userns needs the ValidatingAdmissionPolicy of the chart (Kubernetes 1.30 or newer, and verifier.sandbox.admissionPolicy not never): the namespace of the runners admits privileged pods, and the policy refuses all but runners" -}}
{{- end -}}
{{- if and (include "nouscoder.usesRunners" .) (ne $wanted "never") (or $known (eq $wanted "required")) -}}
{{- if not $known -}}
{{- fail "verifier.sandbox.admissionPolicy is required, but this cluster has no ValidatingAdmissionPolicy (Kubernetes 1.30 or newer)" -}}
{{- end -}}
true
{{- end -}}
{{- end -}}

{{/* The PriorityClasses that a runner may have, as JSON: that of the values; without one, none or the cluster's global
     default, which the API server sets. Without a cluster (helm template) that name is unknown. */}}
{{- define "nouscoder.sandbox.priorityClasses" -}}
{{- $own := .Values.verifier.sandbox.pool.priorityClassName -}}
{{- $allowed := list $own -}}
{{- if not $own -}}
{{- range (lookup "scheduling.k8s.io/v1" "PriorityClass" "" "").items | default list -}}
{{- if .globalDefault -}}{{- $allowed = append $allowed .metadata.name -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- $allowed | toJson -}}
{{- end -}}

{{/* The privileges of a runner. With `gvisor` the standard `baseline` admits them, and they act only inside gVisor: the
     harness makes a user namespace of two users there, and in it the namespaces of each submission. With `userns` they
     act only on what belongs to the pod's user namespace. The harness needs pivot_root, which RuntimeDefault refuses,
     and confines each candidate by its own filter. On the node the sandbox has none of these privileges. */}}
{{- define "nouscoder.runnerPodSecurityContext" -}}
runAsUser: 0
runAsGroup: 0
seccompProfile:
  type: {{ include "nouscoder.runnerSeccomp" . }}
{{- end -}}

{{- define "nouscoder.runnerSeccomp" -}}
{{- ternary "Unconfined" "RuntimeDefault" (eq (include "nouscoder.usesUserns" .) "true") -}}
{{- end -}}

{{/* The Pod Security Standard that admits a runner. */}}
{{- define "nouscoder.runnerStandard" -}}
{{- ternary "privileged" "baseline" (eq (include "nouscoder.usesUserns" .) "true") -}}
{{- end -}}

{{/* A sandbox can mount a /proc of its own only where the pod's is complete. */}}
{{- define "nouscoder.runnerProcMount" -}}
{{- ternary "Unmasked" "Default" (eq (include "nouscoder.usesUserns" .) "true") -}}
{{- end -}}

{{- define "nouscoder.runnerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  add: {{ include "nouscoder.runnerCapabilities" . }}
{{- if include "nouscoder.usesUserns" . }}
procMount: {{ include "nouscoder.runnerProcMount" . }}
{{- end }}
{{- end -}}

{{- define "nouscoder.runnerCapabilities" -}}
{{- if include "nouscoder.usesUserns" . -}}
["SYS_ADMIN", "NET_ADMIN", "SETUID", "SETGID"]
{{- else -}}
["SETUID", "SETGID", "SETFCAP"]
{{- end -}}
{{- end -}}

{{- define "nouscoder.runnerCommand" -}}
["python3", "-I", "-S", "/opt/nouscoder/runner/__main__.py"]
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
  annotations:
    {{- include "nouscoder.annotations" (dict "component" "sandbox" "values" $pool) | nindent 4 }}
spec:
  {{- if include "nouscoder.usesUserns" . }}
  hostUsers: false
  {{- else }}
  runtimeClassName: {{ $sandbox.runtimeClassName | quote }}
  {{- end }}
  {{- include "nouscoder.podStart" (dict "root" . "component" "sandbox" "values" $pool) | nindent 2 }}
  # The verifier replaces a runner that has ended. A Deployment's is started again by the kubelet.
  restartPolicy: {{ ternary "Never" "Always" $pool.managed }}
  terminationGracePeriodSeconds: 1
  # A runner resolves no names.
  dnsPolicy: None
  dnsConfig:
    nameservers: ["127.0.0.1"]
  securityContext:
    {{- include "nouscoder.runnerPodSecurityContext" . | nindent 4 }}
  containers:
    - name: runner
      image: {{ include "nouscoder.image" (dict "root" . "image" $sandbox.image "suffix" $sandbox.libraries) }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      command:
        {{- include "nouscoder.runnerCommand" . | nindent 8 }}
      env:
        - name: NOUSCODER_RUNNER_KEY
          valueFrom:
            secretKeyRef:
              name: {{ include "nouscoder.poolSecret" . }}
              key: key
        {{- if include "nouscoder.usesUserns" . }}
        - name: NOUSCODER_RUNNER_KERNEL
          value: linux
        {{- end }}
        {{- if $pool.managed }}
        # A runner whose verifier is gone ends by itself after this time.
        - name: NOUSCODER_RUNNER_IDLE_S
          value: "600"
        {{- end }}
        {{- if include "nouscoder.claimsRunners" . }}
        # One that waits in the SandboxWarmPool has no verifier yet.
        - name: NOUSCODER_RUNNER_WAITS
          value: "1"
        {{- end }}
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
