{{/* Backups of the runs, and the way back. */}}

{{- define "nouscoder.runsClaim" -}}
{{- .Values.learner.persistence.existingClaim | default (printf "%s-runs" (include "nouscoder.fullname" .)) -}}
{{- end -}}

{{- define "nouscoder.backupClaim" -}}
{{- .Values.backup.persistence.existingClaim | default (printf "%s-backup" (include "nouscoder.fullname" .)) -}}
{{- end -}}

{{- define "nouscoder.restoresFiles" -}}
{{- if and .Values.restore.from (not .Values.backup.volumeSnapshotClass) -}}true{{- end -}}
{{- end -}}

{{/* The source of the runs' claim, as JSON. Kubernetes lets no claim change it, so that of an existing one stays. */}}
{{- define "nouscoder.claimSource" -}}
{{- $claim := lookup "v1" "PersistentVolumeClaim" .Release.Namespace (include "nouscoder.runsClaim" .) -}}
{{- $source := dig "spec" "dataSource" dict $claim -}}
{{- $wanted := ternary .Values.restore.from "" (ne .Values.backup.volumeSnapshotClass "") -}}
{{- if and $claim $wanted (ne $wanted (dig "name" "" $source)) -}}
{{- fail (printf "restore.from is %s, but the claim %s is there, and a claim is filled only when it is made: make a snapshot of it if you need its runs, then delete it" $wanted (include "nouscoder.runsClaim" .)) -}}
{{- end -}}
{{- if and $wanted (not $claim) -}}
{{- $source = dict "apiGroup" "snapshot.storage.k8s.io" "kind" "VolumeSnapshot" "name" $wanted -}}
{{- end -}}
{{- toJson $source -}}
{{- end -}}

{{- define "nouscoder.backupGuards" -}}
{{- $backup := .Values.backup -}}
{{- $from := .Values.restore.from -}}
{{- if and (or $backup.schedule $from) (not .Values.loop.enabled) -}}
{{- fail "backup.schedule and restore.from need loop.enabled: the grading API alone has no runs" -}}
{{- end -}}
{{- if and $backup.volumeSnapshotClass (.Capabilities.APIVersions.Has "v1/Secret") (not (.Capabilities.APIVersions.Has "snapshot.storage.k8s.io/v1/VolumeSnapshot")) -}}
{{- fail "backup.volumeSnapshotClass is set, but this cluster has no VolumeSnapshot (snapshot.storage.k8s.io/v1): leave it empty, and the files are copied to a claim" -}}
{{- end -}}
{{- if and .Values.restore.setAside (not (include "nouscoder.restoresFiles" .)) -}}
{{- fail "restore.setAside needs restore.from, and backup.volumeSnapshotClass empty: a snapshot is restored only to a new claim" -}}
{{- end -}}
{{- if and $from $backup.volumeSnapshotClass .Values.learner.persistence.existingClaim -}}
{{- fail "restore.from cannot fill learner.persistence.existingClaim: make that claim from the VolumeSnapshot yourself (dataSource), and leave restore.from empty" -}}
{{- end -}}
{{- $config := lookup "v1" "ConfigMap" .Release.Namespace (printf "%s-config" (include "nouscoder.fullname" .)) -}}
{{- if and $config $from (ne $from (dig "metadata" "annotations" "nouscoder/restored-from" "" $config)) -}}
{{- fail (printf "restore.from is %s, but the release is at work with later policies and rollouts: helm uninstall, which keeps the claims, then helm install with restore.from" $from) -}}
{{- end -}}
{{- end -}}
