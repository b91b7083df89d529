{{/* Combinations that can't work are refused before anything is installed. */}}
{{- define "nano.checks" -}}
{{- with .Values.gateway -}}
{{- if ge (add .preStopSeconds .drainSeconds) (int .graceSeconds) -}}
{{- fail (printf "gateway.preStopSeconds + gateway.drainSeconds (%d) must be below gateway.graceSeconds (%d), or calls are cut off by SIGKILL" (add .preStopSeconds .drainSeconds) (int .graceSeconds)) -}}
{{- end -}}
{{- end -}}
{{- with .Values.lanes -}}
{{- if ge (int .drainSeconds) (int .graceSeconds) -}}
{{- fail (printf "lanes.drainSeconds (%d) must be below lanes.graceSeconds (%d), or requests are cut off by SIGKILL" (int .drainSeconds) (int .graceSeconds)) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.redis.enabled (not .Values.redis.password) -}}
{{- fail "redis.password must be set: whoever reaches the bus controls the pipeline" -}}
{{- end -}}
{{- if and .Values.redis.enabled (or .Values.redis.url .Values.redis.existingSecret) -}}
{{- fail "redis.url and redis.existingSecret name a bus of your own: set redis.enabled to false with them" -}}
{{- end -}}
{{- if not (or .Values.redis.enabled .Values.redis.url .Values.redis.existingSecret) -}}
{{- fail "without redis.enabled, redis.url or redis.existingSecret must name a bus" -}}
{{- end -}}
{{- if and .Values.redis.url (not (regexMatch "^rediss?(\\+sentinel|\\+cluster)?://[^ ]+$" .Values.redis.url)) -}}
{{- fail "redis.url must begin with redis://, rediss://, redis+sentinel:// or redis+cluster://, and have no spaces" -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled (not .Values.redis.enabled) (not .Values.networkPolicy.egress) -}}
{{- fail "networkPolicy.egress must allow the way to your bus, such as [{ports: [{port: 6379}]}]" -}}
{{- end -}}
{{- if and (include "nano.hasRoles" .) (not (or .Values.kvTransfer.secret .Values.kvTransfer.existingSecret)) -}}
{{- fail "kvTransfer.secret must be set: pods of pools with roles read one another's KV" -}}
{{- end -}}
{{- if (.Values.settings.bus | default dict).url -}}
{{- fail "settings.bus.url would be readable in a ConfigMap, and ignored: set redis.url, or redis.existingSecret" -}}
{{- end -}}
{{- if not (regexMatch "^[^\\s:{}]{1,64}$" .Values.lane) -}}
{{- fail (printf "lane is %q; it must have 1 to 64 characters, without spaces, colons and braces" .Values.lane) -}}
{{- end -}}
{{- if and .Values.redis.enabled (not (regexMatch "^(?i)[1-9][0-9]*([kmg]?b|[kmg])?$" .Values.redis.maxMemory)) -}}
{{- fail (printf "redis.maxMemory is %q; it must be a number of bytes above 0, or such as 512mb or 4gb" .Values.redis.maxMemory) -}}
{{- end -}}
{{- $pools := list -}}
{{- range .Values.pools -}}
{{- if has .name $pools -}}
{{- fail (printf "pools: two are named %s; give each a name of its own" .name) -}}
{{- end -}}
{{- $pools = append $pools .name -}}
{{- end -}}
{{- if and .Values.monitoring.enabled (has (int .Values.monitoring.port) (list (int .Values.gateway.port) (int .Values.kvTransfer.port))) -}}
{{- fail (printf "monitoring.port %d is gateway.port or kvTransfer.port too; give each a port of its own" (int .Values.monitoring.port)) -}}
{{- end -}}
{{- if and .Values.keda.enabled .Values.pools -}}
{{- fail "keda scales lanes: leave out pools, or keda.enabled" -}}
{{- end -}}
{{- if and .Values.keda.enabled (eq .Values.keda.source "metrics-api") (not .Values.gateway.enabled) -}}
{{- fail "keda.source metrics-api reads the gateway: set gateway.enabled, or source prometheus" -}}
{{- end -}}
{{- if and .Values.keda.enabled (eq .Values.keda.source "metrics-api") (not .Values.gateway.insecure) (not .Values.keda.keySecret) -}}
{{- fail "keda.keySecret must name a Secret with a key of the scope read: nano-inference admin keys create keda --scope read" -}}
{{- end -}}
{{- if and .Values.keda.enabled (eq .Values.keda.source "prometheus") (eq (int .Values.keda.minReplicas) 0) -}}
{{- fail "without a lane there is no metric: keda.minReplicas 0 needs keda.source metrics-api" -}}
{{- end -}}
{{- if and .Values.keda.enabled (gt (int .Values.keda.minReplicas) (int .Values.keda.maxReplicas)) -}}
{{- fail "keda.minReplicas must not be above keda.maxReplicas" -}}
{{- end -}}
{{- end -}}
