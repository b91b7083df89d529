{{- define "nano.name" -}}
{{- if contains "nano-inference" .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-nano-inference" (.Release.Name | trunc 25 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- define "nano.selector" -}}
app.kubernetes.io/name: nano-inference
app.kubernetes.io/instance: {{ .Release.Name }}
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
