{{/*
The two containers of ours: the agent, and the restore that runs before it and the trainer.

Restore comes first among the init containers. It then has the volume for itself, and its memory is
not counted on top of the sidecar's. It takes a lock of its own (.ds_ckpt/restore.lock), never the
agent's, so that it may also run again while an agent is at work.
*/}}

{{- define "ds-ckpt-sidecar.containerSecurityContext" -}}
{{- $user := include "ds-ckpt-sidecar.id" .Values.sidecar.runAsUser -}}
{{- with $user }}
runAsUser: {{ . }}
{{- end }}
{{- with include "ds-ckpt-sidecar.id" .Values.sidecar.runAsGroup }}
runAsGroup: {{ . }}
{{- end }}
runAsNonRoot: {{ ne $user "0" }}
readOnlyRootFilesystem: true
allowPrivilegeEscalation: false
privileged: false
capabilities:
  drop:
    - ALL
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* How one mount of the volume looks; several nodes on one claim have a folder each. */}}
{{- define "ds-ckpt-sidecar.mount" -}}
name: ds-ckpt
mountPath: {{ .Values.volume.mountPath | quote }}
{{- if include "ds-ckpt-sidecar.perNode" . }}
subPathExpr: {{ printf "%s/node-$(NODE_RANK)" .Values.volume.subPath | trimPrefix "/" | quote }}
{{- else if .Values.volume.subPath }}
subPath: {{ .Values.volume.subPath | quote }}
{{- end }}
{{- end -}}

{{- define "ds-ckpt-sidecar.perNode" -}}
{{- if and .Values.volume.existingClaim (gt (int64 .Values.workload.nodes) 1) (has .Values.workload.kind (list "IndexedJob" "JobSet" "TrainJob")) -}}
true
{{- end -}}
{{- end -}}

{{/* The number of this pod's node, as the Job's controller has it. */}}
{{- define "ds-ckpt-sidecar.nodeRank" -}}
fieldRef:
  fieldPath: metadata.annotations['batch.kubernetes.io/job-completion-index']
{{- end -}}

{{/* How to reach the store: the same for the sidecar, the restore, and a trainer that reads it. */}}
{{- define "ds-ckpt-sidecar.storeEnv" -}}
{{- range $name := keys .Values.storeEnv | sortAlpha }}
- name: {{ $name }}
  value: {{ include "ds-ckpt-sidecar.scalar" (get $.Values.storeEnv $name) | quote }}
{{- end }}
{{- range .Values.credentials.env }}
- name: {{ .name }}
  valueFrom:
    secretKeyRef:
      name: {{ .secret }}
      key: {{ .key }}
{{- end }}
{{- end -}}

{{- define "ds-ckpt-sidecar.storeEnvFrom" -}}
{{- with .Values.credentials.secret }}
- secretRef:
    name: {{ . }}
{{- end }}
{{- end -}}

{{- define "ds-ckpt-sidecar.storeMounts" -}}
{{- if .Values.credentials.files.secret }}
- name: ds-ckpt-credentials
  mountPath: {{ .Values.credentials.files.mountPath | quote }}
  readOnly: true
{{- end }}
{{- end -}}

{{/* The agent's settings that were given, by the names that it knows them by. */}}
{{- define "ds-ckpt-sidecar.agentEnv" -}}
{{- range $key := keys .Values.agent | sortAlpha }}
{{- $value := get $.Values.agent $key }}
{{- if not (kindIs "invalid" $value) }}
- name: DS_CKPT_{{ snakecase $key | upper }}
  value: {{ include "ds-ckpt-sidecar.scalar" $value | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "ds-ckpt-sidecar.podEnv" -}}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: POD_NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
- name: POD_UID
  valueFrom:
    fieldRef:
      fieldPath: metadata.uid
- name: NODE_NAME
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
{{- if include "ds-ckpt-sidecar.perNode" . }}
- name: NODE_RANK
  valueFrom:
    {{- include "ds-ckpt-sidecar.nodeRank" . | nindent 4 }}
{{- end }}
{{- end -}}

{{- define "ds-ckpt-sidecar.agent" -}}
name: ds-ckpt-sidecar
image: {{ include "ds-ckpt-sidecar.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
args:
  - agent
{{- if .Values.sidecar.native }}
restartPolicy: Always
{{- end }}
env:
  - name: DS_CKPT_VOLUME
    value: {{ .Values.volume.mountPath | quote }}
  - name: DS_CKPT_DESTINATION
    value: {{ .Values.destination | quote }}
  - name: DS_CKPT_RUN_ID
    value: {{ include "ds-ckpt-sidecar.runId" . | quote }}
  - name: DS_CKPT_LISTEN
    value: {{ printf ":%d" (int64 .Values.sidecar.port) | quote }}
  - name: DS_CKPT_DRAIN_SECONDS
    value: {{ include "ds-ckpt-sidecar.drainSeconds" . | quote }}
  - name: DS_CKPT_LOG_FORMAT
    value: json
  {{- with .Values.volume.emptyDir.sizeLimit }}
  - name: DS_CKPT_VOLUME_LIMIT
    value: {{ include "ds-ckpt-sidecar.scalar" . | quote }}
  {{- end }}
  {{- if not .Values.sidecar.native }}
  - name: DS_CKPT_EXIT_WHEN_FINISHED
    value: "1"
  - name: DS_CKPT_TRAINER_GONE_SECONDS
    value: {{ include "ds-ckpt-sidecar.scalar" .Values.sidecar.trainerGoneSeconds | quote }}
  {{- end }}
  {{- if .Values.kubernetesReports.enabled }}
  - name: DS_CKPT_KUBERNETES
    value: "1"
  {{- end }}
  {{- with include "ds-ckpt-sidecar.agentEnv" . | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- include "ds-ckpt-sidecar.podEnv" . | nindent 2 }}
  {{- with include "ds-ckpt-sidecar.storeEnv" . | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with .Values.sidecar.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with include "ds-ckpt-sidecar.storeEnvFrom" . | trim }}
envFrom:
  {{- . | nindent 2 }}
{{- end }}
ports:
  - name: ds-ckpt
    containerPort: {{ .Values.sidecar.port }}
    protocol: TCP
startupProbe:
  httpGet:
    path: {{ ternary "/readyz" "/startedz" .Values.sidecar.startup.requireStore }}
    port: ds-ckpt
  periodSeconds: {{ .Values.sidecar.startup.periodSeconds }}
  timeoutSeconds: 5
  failureThreshold: {{ .Values.sidecar.startup.failureThreshold }}
{{- with .Values.sidecar.liveness }}
{{- if .enabled }}
livenessProbe:
  httpGet:
    path: /healthz
    port: ds-ckpt
  periodSeconds: {{ .periodSeconds }}
  timeoutSeconds: {{ .timeoutSeconds }}
  failureThreshold: {{ .failureThreshold }}
{{- end }}
{{- end }}
{{- with .Values.sidecar.readiness }}
{{- if .enabled }}
readinessProbe:
  httpGet:
    path: /readyz
    port: ds-ckpt
  periodSeconds: {{ .periodSeconds }}
  timeoutSeconds: {{ .timeoutSeconds }}
  failureThreshold: {{ .failureThreshold }}
{{- end }}
{{- end }}
{{- if .Values.sidecar.preStop }}
lifecycle:
  preStop:
    httpGet:
      path: /prestop
      port: ds-ckpt
{{- end }}
terminationMessagePolicy: FallbackToLogsOnError
resources:
  {{- toYaml .Values.sidecar.resources | nindent 2 }}
securityContext:
  {{- include "ds-ckpt-sidecar.containerSecurityContext" . | trim | nindent 2 }}
volumeMounts:
  - {{ include "ds-ckpt-sidecar.mount" . | indent 4 | trim }}
  {{- with include "ds-ckpt-sidecar.storeMounts" . | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- if .Values.kubernetesReports.enabled }}
  - name: ds-ckpt-token
    mountPath: /var/run/secrets/kubernetes.io/serviceaccount
    readOnly: true
  {{- end }}
  {{- with .Values.sidecar.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "ds-ckpt-sidecar.restore" -}}
name: ds-ckpt-restore
image: {{ include "ds-ckpt-sidecar.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
args:
  - restore
  - --from
  - {{ .Values.destination | quote }}
  - --to
  - {{ .Values.volume.mountPath | quote }}
  {{- if .Values.restore.tag }}
  - --tag
  - {{ .Values.restore.tag | quote }}
  {{- else }}
  - --if-any # a first start finds nothing, which is no failure
  {{- end }}
  {{- with .Values.restore.streams }}
  - --streams
  - {{ include "ds-ckpt-sidecar.scalar" . | quote }}
  {{- end }}
  {{- with .Values.restore.bandwidth }}
  - --bandwidth
  - {{ include "ds-ckpt-sidecar.scalar" . | quote }}
  {{- end }}
env:
  {{- with .Values.agent.stallSeconds }}
  - name: DS_CKPT_STALL_SECONDS
    value: {{ include "ds-ckpt-sidecar.scalar" . | quote }}
  {{- end }}
  {{- include "ds-ckpt-sidecar.podEnv" . | nindent 2 }}
  {{- with include "ds-ckpt-sidecar.storeEnv" . | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with .Values.sidecar.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with include "ds-ckpt-sidecar.storeEnvFrom" . | trim }}
envFrom:
  {{- . | nindent 2 }}
{{- end }}
terminationMessagePolicy: FallbackToLogsOnError
resources:
  {{- toYaml (.Values.restore.resources | default .Values.sidecar.resources) | nindent 2 }}
securityContext:
  {{- include "ds-ckpt-sidecar.containerSecurityContext" . | trim | nindent 2 }}
volumeMounts:
  - {{ include "ds-ckpt-sidecar.mount" . | indent 4 | trim }}
  {{- with include "ds-ckpt-sidecar.storeMounts" . | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with .Values.sidecar.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}
