{{/*
The pod template of one kind of process.

Takes a dict: root; role (label, container); args; graceSeconds; resources; and optionally env,
preStopSeconds, startSeconds, web (the gateway: probes by HTTP), computes (executor, volumes).
*/}}
{{- define "nano.pod" -}}
{{- $values := .root.Values -}}
metadata:
  labels:
    {{- include "nano.selector" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .role | quote }}
  annotations:
    # Pods are replaced when settings change.
    checksum/settings: {{ include "nano.settings" .root | sha256sum }}
spec:
  automountServiceAccountToken: false
  # Variables of Services named nano-inference would be taken for settings.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ .graceSeconds }}
  {{- with $values.imagePullSecrets }}
  imagePullSecrets: {{ toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  {{- if .computes }}
  {{- with .nodeSelector }}
  nodeSelector: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- with .tolerations }}
  tolerations: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "nano.selector" .root | nindent 10 }}
          app.kubernetes.io/component: {{ .role | quote }}
  containers:
    - name: {{ .role | quote }}
      image: {{ include "nano.image" .root | quote }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      command: [nano-inference]
      args: {{ concat .args (list "--config" "/etc/nano-inference/config.yaml") | toJson }}
      env:
        - {name: NANO_INFERENCE_BUS__URL_FILE, value: /run/secrets/bus/url}
        {{- if and .computes (include "nano.hasRoles" .root) }}
        - {name: NANO_INFERENCE_ENGINE__KV_SECRET_FILE, value: /run/secrets/kv/kv-secret}
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        - {name: NANO_INFERENCE_ENGINE__KV_LISTEN, value: "$(POD_IP):{{ $values.kvTransfer.port }}"}
        {{- end }}
        {{- if .computes }}
        # PyTorch takes a thread for each processor of the node otherwise.
        - name: OMP_NUM_THREADS
          valueFrom: {resourceFieldRef: {resource: limits.cpu}}
        {{- end }}
        - {name: XDG_CACHE_HOME, value: /var/cache}
        - {name: HF_HUB_OFFLINE, value: "1"}
        {{- with .env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if or .web $values.monitoring.enabled (and .computes (include "nano.hasRoles" .root)) }}
      ports:
        {{- if .web }}
        - {name: http, containerPort: {{ $values.gateway.port }}}
        {{- end }}
        {{- if $values.monitoring.enabled }}
        - {name: metrics, containerPort: {{ $values.monitoring.port }}}
        {{- end }}
        {{- if and .computes (include "nano.hasRoles" .root) }}
        - {name: kv, containerPort: {{ $values.kvTransfer.port }}}
        {{- end }}
      {{- end }}
      {{- with .preStopSeconds }}
      lifecycle:
        preStop: {sleep: {seconds: {{ . }}}}
      {{- end }}
      {{- if .web }}
      {{- $scheme := ternary "HTTPS" "HTTP" (ne $values.gateway.tlsSecret "") }}
      startupProbe:
        httpGet: {path: /livez, port: http, scheme: {{ $scheme }}}
        periodSeconds: 2
        failureThreshold: 60
      livenessProbe:
        httpGet: {path: /livez, port: http, scheme: {{ $scheme }}}
        periodSeconds: 10
        timeoutSeconds: 5
      readinessProbe:
        # Without lanes a gateway has to take the requests that bring them back.
        httpGet: {path: {{ ternary "/livez" "/readyz" (and $values.keda.enabled (eq (int $values.keda.minReplicas) 0)) }}, port: http, scheme: {{ $scheme }}}
        periodSeconds: 5
        timeoutSeconds: 5
      {{- else }}
      startupProbe:
        exec: {command: [nano-inference, health, --live, --config, /etc/nano-inference/config.yaml]}
        periodSeconds: 5
        timeoutSeconds: 10
        failureThreshold: {{ div (add .startSeconds 4) 5 }}
      livenessProbe:
        exec: {command: [nano-inference, health, --progress, --config, /etc/nano-inference/config.yaml]}
        periodSeconds: 20
        timeoutSeconds: 10
      readinessProbe:
        exec: {command: [nano-inference, health, --ready, --config, /etc/nano-inference/config.yaml]}
        periodSeconds: 10
        timeoutSeconds: 10
      {{- end }}
      resources: {{ toYaml .resources | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      volumeMounts:
        - {name: settings, mountPath: /etc/nano-inference, readOnly: true}
        - {name: bus, mountPath: /run/secrets/bus, readOnly: true}
        - {name: tmp, mountPath: /tmp}
        - {name: cache, mountPath: /var/cache}
        - {name: shm, mountPath: /dev/shm}
        {{- if $values.model.claim }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
        {{- if and .web $values.gateway.tlsSecret }}
        - {name: tls, mountPath: /run/secrets/tls, readOnly: true}
        {{- end }}
        {{- if and .computes (include "nano.hasRoles" .root) }}
        - {name: kv-secret, mountPath: /run/secrets/kv, readOnly: true}
        {{- end }}
        {{- if and .computes $values.kvTier.enabled }}
        - {name: kv, mountPath: /var/lib/nano-kv}
        {{- end }}
  volumes:
    - name: settings
      configMap: {name: {{ include "nano.name" .root }}}
    - name: bus
      secret:
        secretName: {{ include "nano.busSecret" .root | quote }}
        defaultMode: 0440
        items: [{key: {{ ternary $values.redis.gatewayUrlKey $values.redis.urlKey (eq .role "gateway") | quote }}, path: url}]
    - {name: tmp, emptyDir: {sizeLimit: 1Gi}}
    - {name: cache, emptyDir: {sizeLimit: 1Gi}}
    # The container runtime's own has 64 MiB.
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: 1Gi}}
    {{- if $values.model.claim }}
    - name: models
      persistentVolumeClaim: {claimName: {{ $values.model.claim | quote }}, readOnly: true}
    {{- end }}
    {{- if and .web $values.gateway.tlsSecret }}
    - name: tls
      secret: {secretName: {{ $values.gateway.tlsSecret | quote }}, defaultMode: 0440}
    {{- end }}
    {{- if and .computes (include "nano.hasRoles" .root) }}
    - name: kv-secret
      secret: {secretName: {{ include "nano.kvSecret" .root | quote }}, defaultMode: 0440}
    {{- end }}
{{- end -}}

{{/* A StatefulSet of pods that run stages. Takes what "nano.pod" takes, and name, replicas (null: KEDA's), start. */}}
{{- define "nano.statefulSet" -}}
{{- $values := .root.Values -}}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace | quote }}
  labels:
    {{- include "nano.labels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .role | quote }}
spec:
  serviceName: {{ include "nano.name" .root }}
  podManagementPolicy: Parallel
  {{- if ne .replicas nil }}
  replicas: {{ .replicas }}
  {{- end }}
  {{- with .start }}
  ordinals: {start: {{ . }}}
  {{- end }}
  selector:
    matchLabels:
      {{- include "nano.selector" .root | nindent 6 }}
      app.kubernetes.io/component: {{ .role | quote }}
  template:
    {{- include "nano.pod" . | nindent 4 }}
  {{- if and .computes $values.kvTier.enabled }}
  persistentVolumeClaimRetentionPolicy: {whenDeleted: Delete, whenScaled: Delete}
  volumeClaimTemplates:
    - apiVersion: v1
      kind: PersistentVolumeClaim
      metadata: {name: kv}
      spec:
        accessModes: [ReadWriteOnce]
        {{- with $values.kvTier.storageClass }}
        storageClassName: {{ . | quote }}
        {{- end }}
        resources: {requests: {storage: {{ add (div (mul $values.kvTier.gibibytes 11) 10) 1 }}Gi}}
  {{- end }}
{{- end -}}

{{- define "nano.disruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace | quote }}
  labels: {{- include "nano.labels" .root | nindent 4 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- include "nano.selector" .root | nindent 6 }}
      app.kubernetes.io/component: {{ .role | quote }}
{{- end -}}
