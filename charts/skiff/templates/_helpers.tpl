{{- define "skiff.name" -}}
{{ printf "%s-operator" .Release.Name | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "skiff.selector" -}}
app.kubernetes.io/name: skiff-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "skiff.labels" -}}
{{ include "skiff.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "skiff.runtimeImage" -}}
{{ .given | default (printf "ghcr.io/skiff-dev/runtime-%s:%s" .device .version) }}
{{- end }}

{{/* What the operator may do in the namespaces that it serves. Each verb is one that its code uses. */}}
{{- define "skiff.rules" -}}
- apiGroups: [serving.skiff.dev]
  resources: [inferenceservices]
  verbs: [list, watch]
- apiGroups: [serving.skiff.dev]
  resources: [inferenceservices/status]
  verbs: [patch]
- apiGroups: [serving.skiff.dev]
  resources: [inferenceservices/finalizers]
  verbs: [update]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services, serviceaccounts, persistentvolumeclaims]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end }}
