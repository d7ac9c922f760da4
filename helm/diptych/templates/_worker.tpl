{{/* One worker pool: configuration, Deployment, headless Service. Takes (root, pool). */}}
{{- define "diptych.workerPool" -}}
{{- $root := index . 0 -}}
{{- $pool := index . 1 -}}
{{- $values := include "diptych.pool" . | fromYaml -}}
{{- $fullname := printf "%s-%s" (include "diptych.fullname" $root) $pool -}}
{{- $config := include "diptych.workerConfig" (list $root $values) -}}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ $fullname }}
  labels: {{- include "diptych.labels" . | nindent 4 }}
data:
  config.yaml: | {{- $config | nindent 4 }}
---
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $fullname }}
  labels: {{- include "diptych.labels" . | nindent 4 }}
spec:
  {{- if not $root.Values.autoscaling.enabled }}
  replicas: {{ $values.replicas }}
  {{- end }}
  progressDeadlineSeconds: {{ add $root.Values.model.loadTimeoutSeconds 300 }}
  strategy: {{- include "diptych.strategy" $values.strategy | nindent 4 }}
  selector:
    matchLabels: {{- include "diptych.selector" . | nindent 6 }}
  template:
    metadata:
      labels: {{- include "diptych.labels" . | nindent 8 }}
        {{- with $values.podLabels }}{{ toYaml . | nindent 8 }}{{- end }}
      annotations:
        checksum/config: {{ $config | sha256sum }}
        {{- with $values.podAnnotations }}{{ toYaml . | nindent 8 }}{{- end }}
    spec:
      serviceAccountName: {{ include "diptych.serviceAccount" . }}
      automountServiceAccountToken: false
      enableServiceLinks: false
      securityContext: {{- toYaml $root.Values.podSecurityContext | nindent 8 }}
      terminationGracePeriodSeconds: {{ add $values.preStopSleepSeconds $values.drainSeconds 15 }}
      {{- include "diptych.placement" (list $root $values) | nindent 6 }}
      containers:
        - name: {{ $pool }}
          image: {{ include "diptych.image" (list $root $root.Values.image) | quote }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          args: [{{ $pool }}, --config, /etc/diptych/config.yaml]
          env: {{- include "diptych.env" $root | nindent 12 }}
            - name: DIPTYCH_WORKER_ADVERTISE_ADDRESS
              value: $(POD_IP):7001
            - name: DIPTYCH_WORKER_WORKER_ID
              value: $(POD_NAME)
            {{- with $values.env }}{{ toYaml . | nindent 12 }}{{- end }}
          ports:
            - {name: grpc, containerPort: 7001, protocol: TCP}
            - {name: admin, containerPort: 7002, protocol: TCP}
          {{- include "diptych.probes" (list "/readyz" $root.Values.model.loadTimeoutSeconds) | nindent 10 }}
          lifecycle:
            preStop:
              exec: {command: [sleep, {{ $values.preStopSleepSeconds | quote }}]}
          resources: {{- include "diptych.workerResources" $values | nindent 12 }}
          securityContext: {{- toYaml $root.Values.securityContext | nindent 12 }}
          volumeMounts:
            - {name: config, mountPath: /etc/diptych, readOnly: true}
            - {name: tickets, mountPath: /etc/diptych-tickets, readOnly: true}
            {{- if $root.Values.handoff.tls.secretName }}
            - {name: kv-tls, mountPath: /etc/diptych-kv-tls, readOnly: true}
            {{- end }}
            - {name: cache, mountPath: /cache}
            - {name: tmp, mountPath: /tmp}
            - {name: shm, mountPath: /dev/shm}
            {{- with $values.extraVolumeMounts }}{{ toYaml . | nindent 12 }}{{- end }}
      volumes:
        - name: config
          configMap: {name: {{ $fullname }}}
        - name: tickets
          secret: {secretName: {{ include "diptych.ticketSecret" $root }}}
        {{- with $root.Values.handoff.tls.secretName }}
        - name: kv-tls
          secret: {secretName: {{ . | quote }}}
        {{- end }}
        {{- include "diptych.cacheVolume" $root | nindent 8 }}
        - name: tmp
          emptyDir: {}
        - name: shm
          emptyDir: {medium: Memory, sizeLimit: {{ $values.shm.sizeLimit }}}
        {{- with $values.extraVolumes }}{{ toYaml . | nindent 8 }}{{- end }}
---
apiVersion: v1
kind: Service
metadata:
  name: {{ $fullname }}
  labels: {{- include "diptych.labels" . | nindent 4 }}
spec:
  clusterIP: None
  publishNotReadyAddresses: false
  selector: {{- include "diptych.selector" . | nindent 4 }}
  ports:
    - {name: grpc, port: 7001, targetPort: grpc, protocol: TCP, appProtocol: grpc}
    - {name: admin, port: 7002, targetPort: admin, protocol: TCP}
{{- include "diptych.serviceAccountObject" . }}
{{- if $values.pdb.enabled }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ $fullname }}
  labels: {{- include "diptych.labels" . | nindent 4 }}
spec:
  maxUnavailable: {{ $values.pdb.maxUnavailable }}
  selector:
    matchLabels: {{- include "diptych.selector" . | nindent 6 }}
{{- end }}
{{- end -}}

{{- define "diptych.workerConfig" -}}
{{- $root := index . 0 -}}
{{- $values := index . 1 -}}
engine: {{- include "diptych.engine" (list $root $values.engine) | nindent 2 }}
worker:
  host: 0.0.0.0
  port: 7001
  admin_port: 7002
  drain_s: {{ $values.drainSeconds }}
  ticket_keys: /etc/diptych-tickets/ticket-keys
  handoff: {{ $root.Values.handoff.mode }}
  kv_transports: {{ $root.Values.handoff.transports | quote }}
  {{- if kindIs "bool" $root.Values.handoff.verifyKv }}
  verify_kv: {{ $root.Values.handoff.verifyKv }}
  {{- end }}
  {{- with $root.Values.handoff.tls }}
  {{- if .secretName }}
  kv_tls_certificate: /etc/diptych-kv-tls/tls.crt
  kv_tls_key: /etc/diptych-kv-tls/tls.key
  kv_tls_authority: /etc/diptych-kv-tls/ca.crt
  {{- if .serverName }}
  kv_tls_name: {{ .serverName | quote }}
  {{- end }}
  {{- end }}
  {{- end }}
  {{- if and (ne $root.Values.handoff.mode "direct") (eq (int $root.Values.kvstore.replicas) 1) }}
  # by name: a store that moved to another node is found again; several are found in the registry
  kvstore: {{ include "diptych.fullname" $root }}-kvstore:7101
  {{- end }}
{{- end -}}

{{/* Requests and limits; a GPU stands in both, equal and quoted. */}}
{{- define "diptych.workerResources" -}}
{{- $resources := deepCopy .resources -}}
{{- if .accelerator.resourceName -}}
{{- $gpu := dict .accelerator.resourceName (toString .accelerator.count) -}}
{{- $_ := set $resources "limits" (mergeOverwrite (default dict $resources.limits) $gpu) -}}
{{- $_ := set $resources "requests" (mergeOverwrite (default dict $resources.requests) $gpu) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
