{{/* The pods of the learner: the first one is rank 0 and has the containers of the run; the others, with the component
     learner-worker, have only ranks. */}}

{{/* Values of the learner with the affinity that keeps its pods together. */}}
{{- define "nouscoder.learnerValues" -}}
{{- $values := deepCopy .Values.learner -}}
{{- /* The right to delete is for an account of its own. */}}
{{- if and (include "nouscoder.releases" .) (not $values.serviceAccount.name) -}}
{{- $_ := set $values.serviceAccount "create" true -}}
{{- end -}}
{{- with $values.topologyKey -}}
{{- $labels := include "nouscoder.selectorLabels" $ | fromYaml -}}
{{- $component := dict "key" "app.kubernetes.io/component" "operator" "In" "values" (list "learner" "learner-worker") -}}
{{- $near := dict "topologyKey" . "labelSelector" (dict "matchLabels" $labels "matchExpressions" (list $component)) -}}
{{- $_ := set $values.affinity "podAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $near)) -}}
{{- end -}}
{{- toYaml $values -}}
{{- end -}}

{{/* metadata and spec of the first pod. */}}
{{- define "nouscoder.learnerPod" -}}
{{- $values := include "nouscoder.learnerValues" . | fromYaml -}}
{{- $context := dict "root" . "component" "learner" "values" $values "name" "learner" "image" $values.image -}}
metadata:
  labels:
    {{- include "nouscoder.podLabels" $context | nindent 4 }}
  annotations:
    {{- include "nouscoder.podAnnotations" $context | nindent 4 }}
spec:
  {{- include "nouscoder.podStart" $context | nindent 2 }}
  {{- with $values.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  terminationGracePeriodSeconds: {{ $values.terminationGracePeriodSeconds }}
  # The container `run` connects to the learner of its own pod, by the name in the learner's certificate. Through the
  # Service the pod would connect to itself, which many networks and every NetworkPolicy here refuse.
  hostAliases:
    - ip: {{ ternary "::1" "127.0.0.1" (eq .Values.ipFamily "IPv6") | quote }}
      hostnames: ["{{ include "nouscoder.learner.fullname" . }}.{{ .Release.Namespace }}.svc"]
  securityContext:
    {{- include "nouscoder.podSecurityContext" $context | nindent 4 }}
  initContainers:
    {{- with include "nouscoder.fetchedFolders" . | fromJsonArray }}
    - {{ include "nouscoder.waitForFiles" (merge (dict "folders" .) $context) | nindent 6 | trim }}
    {{- end }}
    {{- if include "nouscoder.restoresFiles" . }}
    - {{ include "nouscoder.containerStart" (merge (dict "name" "restore" "image" .Values.broker.image) $context) | nindent 6 | trim }}
      command: [nouscoder]
      args: [runs, restore, "/backup/{{ .Values.restore.from }}", "--set-aside={{ .Values.restore.setAside }}", --config=/etc/nouscoder/config.json]
      {{- include "nouscoder.env" $context | nindent 6 }}
      resources:
        {{- toYaml .Values.backup.resources | nindent 8 }}
      securityContext:
        {{- include "nouscoder.securityContext" $context | nindent 8 }}
      volumeMounts:
        {{- include "nouscoder.learnerMounts" . | nindent 8 }}
        - {name: backup, mountPath: /backup, readOnly: true}
    {{- end }}
    # Makes what is missing: the demo's problems, its warm-started policy, the run folder.
    - {{ include "nouscoder.containerStart" (merge (dict "name" "prepare") $context) | nindent 6 | trim }}
      command: [nouscoder]
      args: [prepare-run, /etc/nouscoder/config.json]
      {{- include "nouscoder.env" $context | nindent 6 }}
      resources:
        {{- toYaml $values.resources | nindent 8 }}
      securityContext:
        {{- include "nouscoder.securityContext" $context | nindent 8 }}
      volumeMounts:
        {{- include "nouscoder.learnerMounts" . | nindent 8 }}
        {{- with include "nouscoder.extraMounts" $context }}{{ . | nindent 8 }}{{ end }}
  containers:
    - {{ include "nouscoder.containerStart" $context | nindent 6 | trim }}
      {{- include "nouscoder.learnerServe" . | nindent 6 }}
      {{- include "nouscoder.env" (merge (dict "own" (include "nouscoder.rankEnv" (dict "root" . "number" "0"))) $context) | nindent 6 }}
      ports:
        {{- include "nouscoder.containerPorts" $context | nindent 8 }}
      {{- include "nouscoder.probes" $context | nindent 6 }}
      {{- include "nouscoder.lifecycle" . | nindent 6 }}
      resources:
        {{- include "nouscoder.rankResources" . | nindent 8 }}
      securityContext:
        {{- include "nouscoder.rankSecurityContext" . | nindent 8 }}
      volumeMounts:
        {{- include "nouscoder.learnerMounts" . | nindent 8 }}
        {{- with include "nouscoder.extraMounts" $context }}{{ . | nindent 8 }}{{ end }}
    {{- include "nouscoder.runContainer" (merge (dict "account" (include "nouscoder.releases" .)) $context) | nindent 4 }}
    {{- with include "nouscoder.sidecars" $context }}{{ . | nindent 4 }}{{ end }}
  volumes:
    {{- include "nouscoder.settingsVolume" $context | nindent 4 }}
    {{- include "nouscoder.learnerVolumes" . | nindent 4 }}
    {{- if include "nouscoder.restoresFiles" . }}
    - name: backup
      persistentVolumeClaim: {claimName: {{ include "nouscoder.backupClaim" . }}}
    {{- end }}
    {{- if include "nouscoder.releases" . }}
    # Only the container `run` has this token.
    - name: account
      projected:
        defaultMode: 0440
        sources:
          - serviceAccountToken: {path: token}
          - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
    {{- end }}
    {{- with include "nouscoder.extraVolumes" $context }}{{ . | nindent 4 }}{{ end }}
{{- end -}}

{{/* metadata and spec of the other pods: only ranks. They answer no probe, and end when another rank is lost. */}}
{{- define "nouscoder.learnerWorkerPod" -}}
{{- $values := include "nouscoder.learnerValues" . | fromYaml -}}
{{- $account := include "nouscoder.serviceAccountName" (dict "root" . "component" "learner" "values" $values) -}}
{{- $_ := set $values.serviceAccount "name" $account -}}
{{- $context := dict "root" . "component" "learner-worker" "values" $values "name" "learner" "image" $values.image -}}
metadata:
  labels:
    {{- include "nouscoder.podLabels" $context | nindent 4 }}
  annotations:
    {{- $own := dict "checksum/config" (include "nouscoder.config.read" $context | sha256sum) }}
    {{- include "nouscoder.annotations" (merge (dict "own" $own) $context) | nindent 4 }}
spec:
  {{- include "nouscoder.podStart" $context | nindent 2 }}
  {{- with $values.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  terminationGracePeriodSeconds: {{ $values.terminationGracePeriodSeconds }}
  securityContext:
    {{- include "nouscoder.podSecurityContext" $context | nindent 4 }}
  containers:
    - {{ include "nouscoder.containerStart" $context | nindent 6 | trim }}
      {{- include "nouscoder.learnerServe" . | nindent 6 }}
      {{- include "nouscoder.env" (merge (dict "own" (include "nouscoder.rankEnv" (dict "root" .))) $context) | nindent 6 }}
      resources:
        {{- include "nouscoder.rankResources" . | nindent 8 }}
      securityContext:
        {{- include "nouscoder.rankSecurityContext" . | nindent 8 }}
      volumeMounts:
        {{- include "nouscoder.learnerMounts" . | nindent 8 }}
        {{- with include "nouscoder.extraMounts" $context }}{{ . | nindent 8 }}{{ end }}
    {{- with include "nouscoder.sidecars" $context }}{{ . | nindent 4 }}{{ end }}
  volumes:
    - name: settings
      configMap:
        name: {{ include "nouscoder.fullname" . }}-config
        defaultMode: 0440
    {{- include "nouscoder.learnerVolumes" . | nindent 4 }}
    {{- with include "nouscoder.extraVolumes" $context }}{{ . | nindent 4 }}{{ end }}
{{- end -}}

{{- define "nouscoder.learnerVolumes" -}}
- name: runs
  persistentVolumeClaim:
    claimName: {{ include "nouscoder.runsClaim" . }}
- name: problems
  {{- if include "nouscoder.problemsGiven" . }}
  persistentVolumeClaim: {claimName: {{ include "nouscoder.problemsClaim" . }}, readOnly: true}
  {{- else }}
  emptyDir: {sizeLimit: {{ .Values.problems.persistence.size }}}
  {{- end }}
{{- with include "nouscoder.policyClaim" . }}
- name: policy
  persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
{{- end }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.learner.sharedMemory }}}
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
{{- end -}}

{{- define "nouscoder.learnerMounts" -}}
- {name: settings, mountPath: /etc/nouscoder, readOnly: true}
- {name: runs, mountPath: /runs}
- {name: problems, mountPath: /problems{{ if include "nouscoder.problemsGiven" . }}, readOnly: true{{ end }}}
{{- if include "nouscoder.policyClaim" . }}
- {name: policy, mountPath: /policy, readOnly: true}
{{- end }}
- {name: shm, mountPath: /dev/shm}
- {name: tmp, mountPath: /tmp}
{{- end -}}
