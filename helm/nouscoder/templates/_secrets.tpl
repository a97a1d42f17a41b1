{{/* Names of Secrets, and values that upgrades keep. */}}

{{- define "nouscoder.tokensSecret" -}}
{{- with .Values.verifier.tokens -}}
{{- if .existingSecret -}}{{ .existingSecret }}
{{- else if .create -}}{{ include "nouscoder.verifier.fullname" $ }}-tokens
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The Secret with the tokens of generation's API; empty without that API, and without tokens. */}}
{{- define "nouscoder.openaiSecret" -}}
{{- if .Values.generation.openai.enabled -}}
{{- .Values.generation.openai.existingSecret | default (include "nouscoder.tokensSecret" .) -}}
{{- end -}}
{{- end -}}

{{- define "nouscoder.poolSecret" -}}
{{- default (printf "%s-key" (include "nouscoder.sandbox.fullname" .)) .Values.verifier.sandbox.pool.existingSecret -}}
{{- end -}}

{{- define "nouscoder.redisSecret" -}}
{{- with .Values.redis -}}
{{- if .external.enabled -}}
{{- required "redis.external.enabled needs redis.external.existingSecret: the Secret that holds the URL of that Redis" .external.existingSecret -}}
{{- else -}}
{{- default (include "nouscoder.redis.fullname" $) .existingSecret -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "nouscoder.redisSecretKey" -}}
{{- ternary .Values.redis.external.secretKey "url" .Values.redis.external.enabled -}}
{{- end -}}

{{/* "true" if the chart's own Redis speaks TLS. */}}
{{- define "nouscoder.ownRedisTls" -}}
{{- if and .Values.loop.enabled .Values.redis.tls.enabled (not .Values.redis.external.enabled) -}}true{{- end -}}
{{- end -}}

{{/* The TLS Secret of a component: dict root component */}}
{{- define "nouscoder.tlsSecret" -}}
{{- $own := get .root.Values.tls.existingSecrets .component -}}
{{- $managed := ternary (printf "%s-%s-tls" (include "nouscoder.fullname" .root) .component) "" .root.Values.tls.certManager.enabled -}}
{{- $secret := $own | default $managed | default .root.Values.tls.existingSecret -}}
{{- required (printf "%s needs tls.existingSecret, tls.existingSecrets.%s or tls.certManager.enabled" (ternary "redis.tls.enabled" "tls.enabled" (eq .component "redis")) .component) $secret -}}
{{- end -}}

{{/* The value that an existing Secret of this release holds, decoded, else the new value: dict root secret key new */}}
{{- define "nouscoder.kept" -}}
{{- $secret := lookup "v1" "Secret" .root.Release.Namespace .secret | default dict -}}
{{- $old := get ($secret.data | default dict) .key -}}
{{- ternary .new ($old | b64dec) (empty $old) -}}
{{- end -}}
