{{/* Make a name valid and at most 50 characters long. A changed name ends in a hash of the original, so that two never become the same. */}}
{{- define "skiff.validName" -}}
{{- $valid := . | replace "." "-" -}}
{{- if not (regexMatch "^[a-z]" $valid) }}{{ $valid = printf "skiff-%s" $valid }}{{ end -}}
{{- if or (ne $valid .) (gt (len $valid) 50) -}}
{{ printf "%s-%s" ($valid | trunc 41 | trimSuffix "-") (sha256sum . | trunc 8) }}
{{- else -}}
{{ $valid }}
{{- end -}}
{{- end }}

{{/* The name of all objects in the release's namespace, alone or with a suffix of at most 13 characters. */}}
{{- define "skiff.fullname" -}}
{{ include "skiff.validName" (.Values.fullnameOverride | default (printf "%s-%s" .Release.Name (.Values.nameOverride | default "operator"))) }}
{{- end }}

{{/* The name of all objects outside of it. Neither part can contain a colon, so no two releases of a cluster share it. */}}
{{- define "skiff.clusterName" -}}
{{ printf "skiff:%s:%s" .Release.Namespace (include "skiff.fullname" .) }}
{{- end }}

{{- define "skiff.selector" -}}
app.kubernetes.io/name: {{ printf "skiff-%s" (.Values.nameOverride | default "operator") }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* The name of the router's objects. */}}
{{- define "skiff.routerName" -}}
{{- $name := include "skiff.validName" (printf "%s-router" (.Values.fullnameOverride | default .Release.Name)) -}}
{{- if or (eq $name (include "skiff.fullname" .)) (eq .Values.nameOverride "router") }}
{{- fail "nameOverride: the name router is that of the router's objects; choose another" }}
{{- end -}}
{{ $name }}
{{- end }}

{{- define "skiff.routerClusterName" -}}
{{ printf "skiff:%s:%s" .Release.Namespace (include "skiff.routerName" .) }}
{{- end }}

{{- define "skiff.routerSelector" -}}
app.kubernetes.io/name: skiff-router
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "skiff.routerLabels" -}}
{{ include "skiff.routerSelector" . }}
{{ include "skiff.commonLabels" . }}
{{- end }}

{{- define "skiff.commonLabels" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "skiff.labels" -}}
{{ include "skiff.selector" . }}
{{ include "skiff.commonLabels" . }}
{{- end }}

{{/* Labels of hooks and their pods, which the Deployment and the Service must not select. */}}
{{- define "skiff.hookLabels" -}}
app.kubernetes.io/name: skiff-hook
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: hook
{{ include "skiff.commonLabels" . }}
{{- end }}

{{- define "skiff.image" -}}
{{- $tag := .Values.image.tag | default .Chart.AppVersion -}}
{{- if not (kindIs "string" $tag) }}{{ $tag = int64 $tag }}{{ end -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ $tag }}{{ end }}
{{- end -}}
{{- end }}

{{- define "skiff.runtimeImage" -}}
{{ .given | default (printf "ghcr.io/skiff-dev/runtime-%s:%s" .device .version) }}
{{- end }}

{{- define "skiff.runtimePullSecrets" -}}
{{- $names := list -}}
{{- range .Values.runtimeImage.pullSecrets }}{{ $names = append $names .name }}{{ end -}}
{{ join "," $names }}
{{- end }}

{{/* Security contexts that the restricted Pod Security level requires of a pod and of a container. */}}
{{- define "skiff.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "skiff.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Scheduling of this chart's pods. */}}
{{- define "skiff.placement" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The operator's rights in the namespaces that it watches. Its code uses each of these verbs. */}}
{{- define "skiff.rules" -}}
- apiGroups: [serving.skiff.dev]
  resources: [inferenceservices]
  verbs: [list, watch]
- apiGroups: [serving.skiff.dev]
  resources: [inferenceservices/status, inferenceservices/scale] # scale: autoscaling
  verbs: [patch]
- apiGroups: [serving.skiff.dev]
  resources: [inferenceservices/finalizers]
  verbs: [update]
- apiGroups: [serving.skiff.dev]
  resources: [loraadapters]
  verbs: [list, watch]
- apiGroups: [serving.skiff.dev]
  resources: [loraadapters/status]
  verbs: [patch]
- apiGroups: [""] # the adapters with which pods start
  resources: [configmaps]
  verbs: [get, create, update]
- apiGroups: [apps]
  resources: [controllerrevisions, deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services, serviceaccounts, persistentvolumeclaims]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
{{- if has "HPA" .Values.autoscaling.engines }}
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- if has "KEDA" .Values.autoscaling.engines }}
- apiGroups: [keda.sh]
  resources: [scaledobjects]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- if .Values.inferencePools.enabled }}
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
- apiGroups: [""]
  resources: [pods]
  # patch: the cost of deletion, before a scale-in; get and create: fetchers of LoRAAdapters with credentials
  verbs: [get, list, watch, create, patch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
- apiGroups: [""] # whether a node autoscaler has announced a node for a pod
  resources: [events]
  verbs: [list]
{{- end }}

{{/* The router's rights in the namespaces that it serves: models and their pods' addresses. */}}
{{- define "skiff.routerRules" -}}
- apiGroups: [serving.skiff.dev]
  resources: [inferenceservices]
  verbs: [list, watch]
# The number of pods, to ask for the first one; it reaches nothing else of an InferenceService.
- apiGroups: [serving.skiff.dev]
  resources: [inferenceservices/scale]
  verbs: [patch]
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list, watch]
{{- end }}
