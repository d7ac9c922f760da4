{{- define "diptych.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "diptych.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "diptych.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Labels that never change, for selectors. Takes (root, component). */}}
{{- define "diptych.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "diptych.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "diptych.labels" -}}
{{- $root := index . 0 -}}
{{ include "diptych.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Takes (image values, default tag). */}}
{{- define "diptych.image" -}}
{{- $image := index . 0 -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ default (index . 1) $image.tag }}
{{- end -}}
{{- end -}}

{{- define "diptych.ticketSecret" -}}
{{- default (printf "%s-tickets" (include "diptych.fullname" .)) .Values.tickets.existingSecret -}}
{{- end -}}

{{- define "diptych.redisUrl" -}}
{{- if .Values.redis.enabled -}}
redis://{{ include "diptych.fullname" . }}-redis:6379
{{- else -}}
{{- .Values.externalRedis.url -}}
{{- end -}}
{{- end -}}

{{/* Environment that every service has. */}}
{{- define "diptych.env" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: HOME
  value: /cache
- name: DIPTYCH_CACHE
  value: /cache/diptych
- name: HF_HOME
  value: /cache/huggingface
- name: TRITON_CACHE_DIR
  value: /cache/triton
{{- if and (not .Values.redis.enabled) .Values.externalRedis.existingSecret }}
- name: DIPTYCH_REDIS_REDIS
  valueFrom: {secretKeyRef: {name: {{ .Values.externalRedis.existingSecret }}, key: url}}
{{- else }}
- name: DIPTYCH_REDIS_REDIS
  value: {{ include "diptych.redisUrl" . | quote }}
{{- end }}
{{- if .Values.model.existingSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .Values.model.existingSecret }}, key: HF_TOKEN}}
{{- end }}
{{- end -}}

{{/* The model part of the `engine` section. Takes (root, pool's engine values). */}}
{{- define "diptych.engine" -}}
{{- $root := index . 0 -}}
{{- $engine := dict "model" $root.Values.model.name -}}
{{- with $root.Values.model.servedName }}{{- $_ := set $engine "served_model_name" . -}}{{- end -}}
{{- with $root.Values.model.revision }}{{- $_ := set $engine "revision" . -}}{{- end -}}
{{- toYaml (mergeOverwrite $engine (deepCopy $root.Values.engine) (deepCopy (index . 1))) -}}
{{- end -}}

{{- define "diptych.cacheVolume" -}}
- name: cache
{{- if .Values.model.cache.existingClaim }}
  persistentVolumeClaim: {claimName: {{ .Values.model.cache.existingClaim }}}
{{- else }}
  emptyDir: {sizeLimit: {{ .Values.model.cache.sizeLimit }}}
{{- end }}
{{- end -}}

{{/* Liveness and readiness on the admin port; the startup probe owns weight loading. */}}
{{- define "diptych.probes" -}}
startupProbe:
  httpGet: {path: /readyz, port: admin}
  periodSeconds: 5
  failureThreshold: {{ div (add .Values.model.loadTimeoutSeconds 4) 5 }}
readinessProbe:
  httpGet: {path: /readyz, port: admin}
  periodSeconds: 5
livenessProbe:
  httpGet: {path: /livez, port: admin}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}

{{/* A pool's values: defaults with what the pool overrides. Takes (root, pool); gives YAML. */}}
{{- define "diptych.pool" -}}
{{- $root := index . 0 -}}
{{- toYaml (mergeOverwrite (deepCopy $root.Values.workerDefaults) (deepCopy (index $root.Values (index . 1)))) -}}
{{- end -}}

{{/* ServiceAccount of a component. Takes (root, component). */}}
{{- define "diptych.serviceAccount" -}}
{{- $root := index . 0 -}}
{{- if $root.Values.serviceAccount.create -}}
{{ include "diptych.fullname" $root }}-{{ index . 1 }}
{{- else -}}
default
{{- end -}}
{{- end -}}
