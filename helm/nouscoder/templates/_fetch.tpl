{{/* The Job that fetches a model and problem files, and the containers that wait for it. A folder is whole when it has the
     file .fetched-DIGEST; the digest is that of what the values ask for. */}}

{{- define "nouscoder.fetchesModel" -}}
{{- if and .Values.loop.enabled .Values.fetch.enabled .Values.fetch.model -}}true{{- end -}}
{{- end -}}

{{- define "nouscoder.fetchesProblems" -}}
{{- if and .Values.loop.enabled .Values.fetch.enabled .Values.fetch.commands -}}true{{- end -}}
{{- end -}}

{{/* "true" if the problem files come from outside; else the demo's are made. */}}
{{- define "nouscoder.problemsGiven" -}}
{{- if or .Values.problems.persistence.existingClaim (include "nouscoder.fetchesProblems" .) -}}true{{- end -}}
{{- end -}}

{{- define "nouscoder.problemsClaim" -}}
{{- .Values.problems.persistence.existingClaim | default (printf "%s-problems" (include "nouscoder.fullname" .)) -}}
{{- end -}}

{{/* The claim of the policy to start from; empty where it is made in the run folder. */}}
{{- define "nouscoder.policyClaim" -}}
{{- $own := ternary (printf "%s-policy" (include "nouscoder.fullname" .)) "" (eq (include "nouscoder.fetchesModel" .) "true") -}}
{{- .Values.policy.existingClaim | default $own -}}
{{- end -}}

{{/* The folders that the Job fills, as JSON. */}}
{{- define "nouscoder.fetchedFolders" -}}
{{- $folders := ternary (list "policy") list (eq (include "nouscoder.fetchesModel" .) "true") -}}
{{- if include "nouscoder.fetchesProblems" . -}}{{- $folders = append $folders "problems" -}}{{- end -}}
{{- toJson $folders -}}
{{- end -}}

{{/* The file that says that a folder is whole: list root folder */}}
{{- define "nouscoder.fetchedFile" -}}
{{- $fetch := (index . 0).Values.fetch -}}
{{- $asked := ternary (list $fetch.model $fetch.revision) $fetch.commands (eq (index . 1) "policy") -}}
/{{ index . 1 }}/.fetched-{{ toJson $asked | sha256sum | trunc 12 }}
{{- end -}}

{{/* A container that waits until folders are whole: dict root component values image folders */}}
{{- define "nouscoder.waitForFiles" -}}
{{- include "nouscoder.containerStart" (merge (dict "name" "fetched") .) }}
command: [sh, -euc]
args:
  - |
    for file in{{ range .folders }} {{ include "nouscoder.fetchedFile" (list $.root .) }}{{ end }}; do
      waited=0
      until [ -e "$file" ]; do
        [ "$waited" -gt 0 ] || echo "waiting for $file: kubectl logs -f -l app.kubernetes.io/component=fetch"
        waited=$((waited + 5))
        [ "$waited" -le {{ .root.Values.fetch.waitSeconds }} ] || { echo "$file is not there after {{ .root.Values.fetch.waitSeconds }} s: kubectl logs -l app.kubernetes.io/component=fetch"; exit 1; }
        sleep 5
      done
    done
resources:
  requests: {cpu: 10m, memory: 16Mi}
  limits: {memory: 64Mi}
securityContext:
  {{- include "nouscoder.securityContext" . | nindent 2 }}
volumeMounts:
  {{- range .folders }}
  - {name: {{ . }}, mountPath: /{{ . }}, readOnly: true}
  {{- end }}
{{- end -}}

{{/* What the Job runs. A model that another fetch left is not mixed with this one. */}}
{{- define "nouscoder.fetchScript" -}}
{{- if include "nouscoder.fetchesModel" . -}}
{{- $whole := include "nouscoder.fetchedFile" (list . "policy") -}}
if [ ! -e {{ $whole }} ]; then
  for other in /policy/.fetched-*; do
    if [ -e "$other" ]; then echo "/policy holds another model than {{ .Values.fetch.model }} at {{ .Values.fetch.revision }}: delete its claim, or name another one in policy.existingClaim" >&2; exit 1; fi
  done
  hf download {{ .Values.fetch.model }} --revision {{ .Values.fetch.revision }} --local-dir /policy \
    {{ range list "*.json" "*.safetensors" "*.jinja" "*.model" "*.txt" }} --include '{{ . }}'{{ end }}
  touch {{ $whole }}
fi
{{ end -}}
{{- if include "nouscoder.fetchesProblems" . -}}
{{- $whole := include "nouscoder.fetchedFile" (list . "problems") -}}
if [ ! -e {{ $whole }} ]; then
  cd /tmp
  {{- range .Values.fetch.commands }}
  {{- . | nindent 2 }}
  {{- end }}
  touch {{ $whole }}
fi
{{ end -}}
{{- end -}}

{{/* metadata and spec of the Job's pod. It is placed like the learner, which may have to follow the volume,
     and has its account. */}}
{{- define "nouscoder.fetchPod" -}}
{{- $fetch := .Values.fetch -}}
{{- $values := merge (pick $fetch "extraEnv") (pick .Values.learner "nodeSelector" "tolerations" "affinity") -}}
{{- $account := include "nouscoder.serviceAccountName" (dict "root" . "component" "learner" "values" .Values.learner) -}}
{{- $_ := set $values "serviceAccount" (dict "create" false "name" $account) -}}
{{- with $fetch.existingSecret -}}
{{- $_ := set $values "extraEnvFrom" (list (dict "secretRef" (dict "name" .))) -}}
{{- end -}}
{{- $context := dict "root" . "component" "fetch" "values" $values "name" "fetch" "image" .Values.learner.image -}}
metadata:
  labels:
    {{- include "nouscoder.podLabels" $context | nindent 4 }}
spec:
  {{- include "nouscoder.podStart" $context | nindent 2 }}
  restartPolicy: OnFailure
  securityContext:
    {{- include "nouscoder.podSecurityContext" $context | nindent 4 }}
  containers:
    - {{ include "nouscoder.containerStart" $context | nindent 6 | trim }}
      command: [sh, -euc]
      args:
        - |
          {{- include "nouscoder.fetchScript" . | nindent 10 }}
      {{- include "nouscoder.env" $context | nindent 6 }}
      resources:
        {{- toYaml $fetch.resources | nindent 8 }}
      securityContext:
        {{- include "nouscoder.securityContext" $context | nindent 8 }}
      volumeMounts:
        {{- range include "nouscoder.fetchedFolders" . | fromJsonArray }}
        - {name: {{ . }}, mountPath: /{{ . }}}
        {{- end }}
        - {name: tmp, mountPath: /tmp}
  volumes:
    {{- range include "nouscoder.fetchedFolders" . | fromJsonArray }}
    - name: {{ . }}
      persistentVolumeClaim: {claimName: {{ include (printf "nouscoder.%sClaim" .) $ }}}
    {{- end }}
    - name: tmp
      emptyDir: {sizeLimit: {{ $fetch.tmpSize }}}
{{- end -}}

{{/* Checks that the schema cannot express. */}}
{{- define "nouscoder.fetchGuards" -}}
{{- $fetch := .Values.fetch -}}
{{- if and (or $fetch.model $fetch.commands) (not $fetch.enabled) -}}
{{- fail "fetch.model and fetch.commands need fetch.enabled: nothing would be fetched" -}}
{{- end -}}
{{- if and .Values.loop.enabled $fetch.enabled -}}
{{- if not (or $fetch.model $fetch.commands) -}}
{{- fail "fetch.enabled needs fetch.model, the model of a hub, or fetch.commands, which write problem files to /problems" -}}
{{- end -}}
{{- $path := dig "policy" "path" "" .Values.config | default "" -}}
{{- if and $fetch.model (ne $path "/policy") -}}
{{- fail (printf "config.policy.path is %q, but fetch.model is fetched to /policy: set config.policy.path to /policy" $path) -}}
{{- end -}}
{{- if and $fetch.model (gt (int .Values.learner.pods) 1) (not .Values.policy.existingClaim) (not (has "ReadWriteMany" .Values.policy.persistence.accessModes)) -}}
{{- fail (printf "learner.pods is %v: all of them mount the fetched model, so policy.persistence.accessModes must be [ReadWriteMany]" .Values.learner.pods) -}}
{{- end -}}
{{- end -}}
{{- end -}}
