{{/* What an upgrade may not change. `helm template` without --dry-run=server and `helm rollback` check nothing. */}}

{{/* The value of a key of the configuration as JSON: dict tree key default */}}
{{- define "nouscoder.valueOf" -}}
{{- $found := .tree -}}
{{- range splitList "." .key -}}
{{- $here := ternary $found dict (kindIs "map" $found) -}}
{{- $found = ternary (get $here .) nil (hasKey $here .) -}}
{{- end -}}
{{- toJson (ternary .default $found (kindIs "invalid" $found)) -}}
{{- end -}}

{{/* The name of the run that this release has begun, for certain: the learner's container `prepare` accepted the
     configuration that is in the cluster, now or at an earlier upgrade. The ConfigMap notes it. */}}
{{- define "nouscoder.begun" -}}
{{- $there := lookup "v1" "ConfigMap" .Release.Namespace (printf "%s-config" (include "nouscoder.fullname" .)) -}}
{{- $config := dig "data" "config.json" "{}" $there | fromJson -}}
{{- $run := ternary (dig "run" "name" "run" $config) "" (hasKey $config "run") -}}
{{- $begun := eq (dig "data" "begun" "" $there) $run -}}
{{- if and $run (not $begun) -}}
{{- $learner := include "nouscoder.componentSelectorLabels" (dict "root" . "component" "learner") | fromYaml -}}
{{- range (lookup "v1" "Pod" .Release.Namespace "").items | default list -}}
{{- $labels := .metadata.labels | default dict -}}
{{- if eq (toJson (merge (dict) $learner $labels)) (toJson $labels) -}}
{{- range dig "status" "initContainerStatuses" list . -}}
{{- $begun = or $begun (and (eq .name "prepare") (eq (dig "state" "terminated" "exitCode" -1 . | int) 0)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $begun -}}{{- $run -}}{{- end -}}
{{- end -}}

{{/* Fails if the values change what the run that has begun cannot change (files/fixed.json). */}}
{{- define "nouscoder.upgradeGuards" -}}
{{- with include "nouscoder.begun" . -}}
{{- $there := lookup "v1" "ConfigMap" $.Release.Namespace (printf "%s-config" (include "nouscoder.fullname" $)) -}}
{{- $before := get $there.data "config.json" | fromJson -}}
{{- $now := include "nouscoder.config.json" $ | fromJson -}}
{{- $fixed := $.Files.Get "files/fixed.json" | fromJson -}}
{{- $isRun := eq . (dig "run" "name" "run" $now) -}}
{{- $stages := list (first (dig "plan" "stages" list $before | default list) | default dict) (first (dig "plan" "stages" list $now | default list) | default dict) -}}
{{- $wrong := list -}}
{{- if and $isRun (ne (pick (first $stages) "name" "from" "yarn" | toJson) (pick (last $stages) "name" "from" "yarn" | toJson)) -}}
{{- $wrong = append $wrong (printf "name, from or yarn of the first of config.plan.stages is %s, which began as %s" (last $stages | toJson) (first $stages | toJson)) -}}
{{- end -}}
{{- range $set := list (list dict dict) (list (first $stages).set (last $stages).set) -}}
{{- $old := mustMergeOverwrite (deepCopy $before) (first $set | default dict) -}}
{{- $new := mustMergeOverwrite (deepCopy $now) (last $set | default dict) -}}
{{- range $key, $default := ternary $fixed.run $fixed.problems $isRun -}}
{{- $was := include "nouscoder.valueOf" (dict "tree" $old "key" $key "default" $default) -}}
{{- $is := include "nouscoder.valueOf" (dict "tree" $new "key" $key "default" $default) -}}
{{- $isOff := and (hasPrefix "learner.lora." $key) (not (dig "learner" "lora" "rank" 0 $old)) (not (dig "learner" "lora" "rank" 0 $new)) -}}
{{- if and (ne $was $is) (not $isOff) -}}
{{- $wrong = append $wrong (printf "config.%s is %s, but it was %s" $key $is $was) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $wrong $isRun -}}
{{- fail (printf "%s when the run %s began, which cannot change it: put it back, or begin another run with config.run.name" (uniq $wrong | join "; ") .) -}}
{{- else if and $wrong (eq (dig "problems" "train" "" $before) (dig "problems" "train" "" $now)) (not (include "nouscoder.problemsGiven" $)) -}}
{{- fail (printf "%s when the problem files of the run %s were made, which another run gets too: put it back, or name other files in config.problems.train and config.problems.held_out" (uniq $wrong | join "; ") .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
