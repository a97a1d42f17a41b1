{{/* The configuration file of all services, as JSON: .Values.config, overridden by what the chart sets. */}}

{{- /* Whether generation's environment calls the verifier: then it may reach it, and has its token. */}}
{{- define "nouscoder.usesTools" -}}
{{- $generation := .Values.config.generation | default dict -}}
{{- $environment := $generation.environment | default dict -}}
{{- if ne ($environment.kind | default "single_turn") "single_turn" }}true{{ end }}
{{- end -}}

{{- define "nouscoder.config.json" -}}
{{- $tree := include "nouscoder.config.given" . | fromJson -}}
{{- include "nouscoder.readNumbers" (dict "config" $tree "numbers" (.Files.Get "files/numbers.json" | fromJson)) -}}
{{- toPrettyJson $tree }}
{{ end -}}

{{/* The same, in which a fraction may still be a string. */}}
{{- define "nouscoder.config.given" -}}
{{- $tree := deepCopy .Values.config -}}
{{- if not .Values.loop.enabled -}}
{{- $tree = pick $tree "verifier" -}}
{{- end -}}
{{- mustMergeOverwrite $tree (include "nouscoder.ownConfig" . | fromYaml) | toJson -}}
{{- end -}}

{{/* The part of the configuration that a component reads. A change of the rest does not restart it: dict root component */}}
{{- define "nouscoder.config.read" -}}
{{- $tree := include "nouscoder.config.given" .root | fromJson -}}
{{- if and $tree.run (ne .component "learner") -}}{{- $_ := unset $tree.run "release" -}}{{- end -}}
{{- if eq .component "verifier" -}}
{{- omit $tree "generation" "learner" "policy" "demo" "plan" | toJson -}}
{{- else -}}
{{- merge (dict "verifier" (pick $tree.verifier "grpc" "metrics")) (omit $tree "verifier") | toJson -}}
{{- end -}}
{{- end -}}

{{/* `helm --set a=0.4` gives the string "0.4". This replaces each by the number, in place: dict config numbers */}}
{{- define "nouscoder.readNumbers" -}}
{{- $config := .config -}}
{{- range $path, $bounds := .numbers -}}
{{- $keys := splitList "." $path -}}
{{- $section := $config -}}
{{- range $keys | initial | rest -}}
{{- $section = index (ternary $section dict (kindIs "map" $section)) . -}}
{{- end -}}
{{- $key := last $keys -}}
{{- $value := index (ternary $section dict (kindIs "map" $section)) $key -}}
{{- if and (kindIs "string" $value) $value -}}
{{- $_ := set $section $key (include "nouscoder.bounded" (dict "path" $path "bounds" $bounds "value" $value) | float64) -}}
{{- else if kindIs "slice" $value -}}
{{- $numbers := list -}}
{{- range $value -}}
{{- $numbers = append $numbers (include "nouscoder.bounded" (dict "path" $path "bounds" $bounds "value" .) | float64) -}}
{{- end -}}
{{- $_ := set $section $key $numbers -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A number, or a failure that names the value; the schema checks the bounds of numbers, but not of strings. */}}
{{- define "nouscoder.bounded" -}}
{{- $number := float64 .value -}}
{{- $wrong := list -}}
{{- range $bound, $limit := .bounds -}}
{{- if or (and (eq $bound "minimum") (lt $number (float64 $limit))) (and (eq $bound "maximum") (gt $number (float64 $limit))) (and (eq $bound "exclusiveMinimum") (le $number (float64 $limit))) (and (eq $bound "exclusiveMaximum") (ge $number (float64 $limit))) -}}
{{- $wrong = append $wrong (printf "%s %v" $bound $limit) -}}
{{- end -}}
{{- end -}}
{{- with $wrong -}}{{- fail (printf "%s is %v, which is not allowed: %s" $.path $.value (join ", " .)) -}}{{- end -}}
{{- .value -}}
{{- end -}}

{{- define "nouscoder.ownConfig" -}}
{{- $root := . -}}
{{- $port := include "nouscoder.ports" . | fromJson -}}
{{- $listen := include "nouscoder.listen" . -}}
{{- $services := ternary (list "broker" "verifier" "generation" "learner") (list "verifier") .Values.loop.enabled -}}
{{- $tree := dict -}}
{{- range $services -}}
{{- $own := dict "grpc" (include "nouscoder.address" (dict "root" $root "component" . "port" (get $port .))) -}}
{{- $_ := set $own "metrics" (include "nouscoder.metricsAddress" (dict "root" $root "component" .)) -}}
{{- $_ := set $own "grpc_health" (printf "%s:%v" $listen $port.health) -}}
{{- $_ := set $tree . $own -}}
{{- end -}}
{{- $verifier := $tree.verifier -}}
{{- $_ := set $verifier "http" (printf "%s:%v" $listen $port.http) -}}
{{- if include "nouscoder.tokensSecret" . -}}
{{- $_ := set $verifier "tokens_file" "/etc/nouscoder/tokens/tokens" -}}
{{- end -}}
{{- $_ := set $verifier "tests" (dict "cache" "/tests") -}}
{{- $_ := set $verifier "sandbox" (include "nouscoder.sandboxConfig" . | fromYaml) -}}
{{- if .Values.tls.enabled -}}
{{- $tls := dict "certificate" "/etc/nouscoder/tls/tls.crt" "key" "/etc/nouscoder/tls/tls.key" -}}
{{- $_ := set $tree "tls" (merge (dict "ca" "/etc/nouscoder/tls/ca.crt") $tls) -}}
{{- $_ := set $verifier "tls" (ternary (merge (dict "client_ca" "/etc/nouscoder/tls/ca.crt") $tls) $tls .Values.tls.gradingClientCertificates) -}}
{{- end -}}
{{- if .Values.loop.enabled -}}
{{- $_ := set $tree "run" (dict "root" "/runs" "services" "external" "pages" (printf "%s:%v" $listen $port.pages)) -}}
{{- if include "nouscoder.releases" . -}}
{{- $_ := set $tree.run "release" (include "nouscoder.releaseConfig" . | fromYaml) -}}
{{- end -}}
{{- if include "nouscoder.tokensSecret" . -}}
{{- $_ := set $tree.run "verifier_token_file" "/etc/nouscoder/tokens/token" -}}
{{- end -}}
{{- $_ := set $tree "learner" (merge $tree.learner (dict "start_after" "evaluation_before.json" "folder_patience_s" 120 "serve_after_run" true)) -}}
{{- $_ := set $tree "problems" (dict "index" "/index") -}}
{{- $_ := set $tree.broker "redis_url_file" "/etc/nouscoder/redis/url" -}}
{{- $_ := set $tree.generation "policy_from" "learner" -}}
{{- $_ := set $tree.generation "cache" "/cache/policies" -}}
{{- if .Values.generation.openai.enabled -}}
{{- $openai := dict "http" (printf "%s:%v" $listen $port.openai) -}}
{{- if include "nouscoder.openaiSecret" . -}}
{{- $_ := set $openai "tokens_file" "/etc/nouscoder/openai/tokens" -}}
{{- end -}}
{{- if .Values.tls.enabled -}}
{{- $_ := set $openai "tls" (dict "certificate" "/etc/nouscoder/tls/tls.crt" "key" "/etc/nouscoder/tls/tls.key") -}}
{{- end -}}
{{- $_ := set $tree.generation "openai" $openai -}}
{{- end -}}
{{- end -}}
{{- toYaml $tree -}}
{{- end -}}

{{/* Size of the verifier's volume of tests: the cache, the clients' tests unless they have their own store, 64 MiB more. */}}
{{- define "nouscoder.testsVolumeSize" -}}
{{- $tests := dig "verifier" "tests" dict .Values.config -}}
{{- $why := "must be set: the size of the verifier's volume of tests is computed from it" -}}
{{- $cached := required (printf "config.verifier.tests.cache_bytes %s" $why) $tests.cache_bytes -}}
{{- $stored := required (printf "config.verifier.tests.store_bytes %s" $why) $tests.store_bytes -}}
{{- add 64 (div (add (int64 $cached) (ternary 0 (int64 $stored) (not (empty $tests.store)))) 1048576) }}Mi
{{- end -}}

{{- define "nouscoder.sandboxConfig" -}}
{{- $sandbox := .Values.verifier.sandbox -}}
{{- $backend := include "nouscoder.sandboxBackend" . -}}
backend: {{ $backend }}
{{- if include "nouscoder.usesRunners" . }}
slots: {{ $sandbox.pool.size }}
max_sessions: {{ $sandbox.pool.maxSessions }}
pool_managed: {{ $sandbox.pool.managed }}
pool_port: {{ (include "nouscoder.ports" . | fromJson).runner }}
pool_key_file: /etc/nouscoder/pool/key
{{- if $sandbox.acceptUnprovenKernel }}
pool_accept_unproven_kernel: true
{{- end }}
{{- if $sandbox.pool.managed }}
pool_spares: {{ ternary 0 $sandbox.pool.spares (eq (include "nouscoder.claimsRunners" .) "true") }}
{{- if not (kindIs "invalid" $sandbox.pool.min) }}
pool_min: {{ $sandbox.pool.min }}
pool_idle_s: {{ $sandbox.pool.idleSeconds }}
{{- end }}
pool_template: /etc/nouscoder/pool/{{ include "nouscoder.runnerFile" . }}
{{- else }}
pool_service: {{ include "nouscoder.sandbox.fullname" . }}.{{ include "nouscoder.sandbox.namespace" . }}.svc
{{- end }}
{{- else if eq $backend "modal" }}
slots: {{ $sandbox.modal.slots }}
max_sessions: {{ $sandbox.pool.maxSessions }}
pool_spares: {{ $sandbox.pool.spares }}
{{- else }}
slots: {{ $sandbox.localSlots }}
{{- end }}
{{- end -}}
