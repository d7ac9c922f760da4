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
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Takes (root, image values). */}}
{{- define "diptych.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- with default $root.Values.global.imageRegistry $image.registry }}{{ . }}/{{ end -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ default $root.Chart.AppVersion $image.tag }}
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
# the image's user has no entry in /etc/passwd, and an arbitrary one (OpenShift) has none either
- name: USER
  value: diptych
- name: HOME
  value: /cache
- name: DIPTYCH_CACHE
  value: /cache/diptych
- name: HF_HOME
  value: /cache/huggingface
- name: TRITON_CACHE_DIR
  value: /cache/triton
- name: TORCHINDUCTOR_CACHE_DIR
  value: /cache/torchinductor
- name: XDG_CACHE_HOME
  value: /cache
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
{{- else if .Values.model.cache.hostPath }}
  hostPath: {path: {{ .Values.model.cache.hostPath | quote }}, type: Directory}
{{- else }}
  emptyDir: {sizeLimit: {{ .Values.model.cache.sizeLimit }}}
{{- end }}
{{- end -}}

{{/* Probes on the admin port. The startup probe owns weight loading: until it has succeeded the
others do not run. Takes (path of the startup probe, seconds it may take). */}}
{{- define "diptych.probes" -}}
startupProbe:
  httpGet: {path: {{ index . 0 }}, port: admin}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: {{ div (add (index . 1) 1) 2 }}
readinessProbe:
  httpGet: {path: /readyz, port: admin}
  periodSeconds: 5
  timeoutSeconds: 5
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
{{ default "default" $root.Values.serviceAccount.name }}
{{- end -}}
{{- end -}}

{{/* The ServiceAccount itself, after a `---`; nothing where accounts are not created. Takes (root,
component). Its token is mounted only into a pod that asks for it. */}}
{{- define "diptych.serviceAccountObject" -}}
{{- $root := index . 0 -}}
{{- if $root.Values.serviceAccount.create }}
---
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ include "diptych.serviceAccount" . }}
  labels: {{- include "diptych.labels" . | nindent 4 }}
  {{- with $root.Values.serviceAccount.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
{{- end }}
{{- end -}}

{{/* What a user may set of any pod's placement. Takes (root, component's values). */}}
{{- define "diptych.placement" -}}
{{- $root := index . 0 -}}
{{- $values := index . 1 -}}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- range $key := list "runtimeClassName" "priorityClassName" }}
{{- with index $values $key }}
{{ $key }}: {{ . }}
{{- end }}
{{- end }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
{{- with index $values $key }}
{{ $key }}: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* A Deployment's strategy: `Recreate` takes no figures, those of the defaults included. */}}
{{- define "diptych.strategy" -}}
{{- if eq .type "Recreate" -}}
type: Recreate
{{- else -}}
{{ toYaml . }}
{{- end -}}
{{- end -}}
