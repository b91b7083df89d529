{{/*
At most 40 characters, as a Service may be named: a name of a release may have dots, and begin with
a digit. A name that is cut or changed ends with a hash, so that no two releases have the same.
*/}}
{{- define "nano.name" -}}
{{- $release := .Release.Name -}}
{{- $wanted := printf "%s-nano-inference" $release -}}
{{- if contains "nano-inference" $release -}}
{{- $wanted = $release -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]" $wanted) -}}
{{- $wanted = printf "nano-inference-%s" $release -}}
{{- end -}}
{{- include "nano.fit" (dict "name" $wanted "most" 40) -}}
{{- end -}}

{{- define "nano.fit" -}}
{{- $fit := regexReplaceAll "[^a-z0-9-]" .name "-" -}}
{{- if or (ne $fit .name) (gt (len $fit) (int .most)) -}}
{{- $fit = printf "%s-%s" ($fit | trunc (int (sub .most 9)) | trimSuffix "-") (.name | sha256sum | trunc 8) -}}
{{- end -}}
{{- $fit -}}
{{- end -}}

{{/* Of the StatefulSet of a pool: Kubernetes adds 11 characters in a label, which takes 63. */}}
{{- define "nano.poolName" -}}
{{- include "nano.fit" (dict "name" (printf "%s-%s" (include "nano.name" .root) .pool) "most" 52) -}}
{{- end -}}

{{- define "nano.selector" -}}
app.kubernetes.io/name: nano-inference
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "nano.labels" -}}
{{ include "nano.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "nano.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "nano.replicas" -}}
{{- $count := 0 -}}
{{- range .Values.pools }}{{ $count = add $count .replicas }}{{ end -}}
{{- $count -}}
{{- end -}}

{{/* "yes" if some pool does only a half of the work. */}}
{{- define "nano.hasRoles" -}}
{{- $found := "" -}}
{{- range .Values.pools }}{{ if ne (.role | default "both") "both" }}{{ $found = "yes" }}{{ end }}{{ end -}}
{{- $found -}}
{{- end -}}

{{- define "nano.busSecret" -}}
{{- .Values.redis.existingSecret | default (printf "%s-bus" (include "nano.name" .)) -}}
{{- end -}}

{{- define "nano.kvSecret" -}}
{{- .Values.kvTransfer.existingSecret | default (printf "%s-kv" (include "nano.name" .)) -}}
{{- end -}}

{{- define "nano.busUrl" -}}
{{- if .Values.redis.enabled -}}
redis://:{{ .Values.redis.password | urlquery | replace "+" "%20" }}@{{ include "nano.name" . }}-redis:6379/0
{{- else -}}
{{ .Values.redis.url }}
{{- end -}}
{{- end -}}

{{/* Names under which the gateway is called; it refuses others, against DNS rebinding. */}}
{{- define "nano.hosts" -}}
{{- $service := printf "%s-gateway" (include "nano.name" .) -}}
{{- $inNamespace := printf "%s.%s" $service .Release.Namespace -}}
{{- $names := list $service $inNamespace (printf "%s.svc" $inNamespace) (printf "%s.svc.cluster.local" $inNamespace) -}}
{{- if .Values.ingress.host }}{{ $names = append $names .Values.ingress.host }}{{ end -}}
{{- concat $names .Values.gateway.hosts | toJson -}}
{{- end -}}
