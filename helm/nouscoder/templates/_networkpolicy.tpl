{{/* Rules of NetworkPolicies, one per helper. */}}

{{/* Start of a component's policy: dict root component, and namespace if it is not the release's */}}
{{- define "nouscoder.networkPolicyStart" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "nouscoder.fullname" .root }}-{{ .component }}
  {{- with .namespace }}
  namespace: {{ . }}
  {{- end }}
  labels:
    {{- include "nouscoder.labels" . | nindent 4 }}
spec:
  podSelector:
    matchLabels:
      {{- include "nouscoder.componentSelectorLabels" . | nindent 6 }}
  policyTypes: [Ingress, Egress]
{{- end -}}

{{/* Pods of other components as peers: dict root components */}}
{{- define "nouscoder.peers" -}}
{{- $root := .root -}}
{{- range .components }}
- podSelector:
    matchLabels:
      {{- include "nouscoder.componentSelectorLabels" (dict "root" $root "component" .) | nindent 6 }}
{{- end }}
{{- end -}}

{{/* An ingress or egress rule: dict root direction(from|to) components port */}}
{{- define "nouscoder.arrow" -}}
- {{ .direction }}:
    {{- include "nouscoder.peers" . | trim | nindent 4 }}
  ports:
    {{- range .ports }}
    - {protocol: TCP, port: {{ . }}}
    {{- end }}
{{- end -}}

{{/* A rule between verifier and runners, which are in different namespaces: dict root direction(from|to) component namespace */}}
{{- define "nouscoder.sandboxArrow" -}}
- {{ .direction }}:
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: {{ .namespace }}
      podSelector:
        matchLabels:
          {{- include "nouscoder.componentSelectorLabels" . | nindent 10 }}
  ports:
    - {protocol: TCP, port: {{ include "nouscoder.port" (list .root "runner") }}}
{{- end -}}

{{/* Ingress to the metrics port, from metricsFrom and `components`. Without peers there is no rule, because a rule without
     peers admits all: dict root components */}}
{{- define "nouscoder.metricsArrow" -}}
{{- $components := concat (.components | default list) (ternary (list "test") list .root.Values.tests.enabled) -}}
{{- include "nouscoder.openArrow" (dict "root" .root "peers" .root.Values.networkPolicy.metricsFrom "components" $components "ports" (list (include "nouscoder.ports" .root | fromJson).metrics)) -}}
{{- end -}}

{{/* Ingress from configured peers and from components; no rule if both are empty: dict root peers components ports */}}
{{- define "nouscoder.openArrow" -}}
{{- if or .peers .components -}}
- from:
    {{- with .peers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- with .components }}
    {{- include "nouscoder.peers" (dict "root" $.root "components" .) | trim | nindent 4 }}
    {{- end }}
  ports:
    {{- range .ports }}
    - {protocol: TCP, port: {{ . }}}
    {{- end }}
{{- end -}}
{{- end -}}

{{/* Egress to DNS. */}}
{{- define "nouscoder.dnsArrow" -}}
{{- with .Values.networkPolicy.dnsTo -}}
- to:
    {{- toYaml . | nindent 4 }}
  ports:
    {{- range $.Values.networkPolicy.dnsPorts }}
    - {protocol: UDP, port: {{ . }}}
    - {protocol: TCP, port: {{ . }}}
    {{- end }}
{{- end -}}
{{- end -}}

{{/* Egress to the Kubernetes API. */}}
{{- define "nouscoder.apiServerArrow" -}}
- to:
    {{- range .Values.networkPolicy.apiServer.cidrs }}
    - ipBlock: {cidr: {{ . | quote }}}
    {{- end }}
  ports:
    {{- range .Values.networkPolicy.apiServer.ports }}
    - {protocol: TCP, port: {{ . }}}
    {{- end }}
{{- end -}}

{{/* Additional egress from the values: dict root component */}}
{{- define "nouscoder.extraEgress" -}}
{{- with get .root.Values.networkPolicy.extraEgress .component -}}
{{- toYaml . -}}
{{- end -}}
{{- end -}}
