{{/*
The pod of the ready chart: the user's container, ours, and what both need.

Given a dict: own (the chart's context), container (name of the trainer's container), masterAddr
(host of the first node, or "" where the controller tells it).
*/}}

{{/*
A pod's template cannot be changed in place, so the workload's name ends with a hash of it, and of
what else cannot. A change makes a new workload. Both helms, and later charts, hash the same.
*/}}
{{- define "ds-ckpt-sidecar.workloadName" -}}
{{- $names := list "kind" "nodes" "podFailurePolicy" -}}
{{- if has .Values.workload.kind (list "IndexedJob" "JobSet") -}}
{{- $names = append $names "masterPort" -}}
{{- end -}}
{{- if not (has .Values.workload.kind (list "Job" "IndexedJob")) -}}
{{- $names = concat $names (list "processesPerNode" "restartPolicy" "backoffLimit" "podReplacementPolicy" "maxRestarts" "activeDeadlineSeconds") -}}
{{- end -}}
{{- $fixed := list -}}
{{- range $names -}}
{{- with get $.Values.workload . -}}
{{- $fixed = append $fixed . -}}
{{- end -}}
{{- end -}}
{{- $template := include "ds-ckpt-sidecar.podTemplate" (dict "own" . "container" "trainer" "masterAddr" "") -}}
{{- printf "%s-%s" (include "ds-ckpt-sidecar.fullname" .) (printf "%s\n%s" (toJson $fixed) $template | sha256sum | trunc 8) -}}
{{- end -}}

{{/* For torchrun, which reads PET_*, and for what reads the plain names. */}}
{{- define "ds-ckpt-sidecar.rendezvous" -}}
{{- $own := .own -}}
{{- if .masterAddr }}
- name: MASTER_ADDR
  value: {{ .masterAddr | quote }}
- name: MASTER_PORT
  value: {{ int64 $own.Values.workload.masterPort | quote }}
- name: NNODES
  value: {{ int64 $own.Values.workload.nodes | quote }}
- name: NODE_RANK
  valueFrom:
    {{- include "ds-ckpt-sidecar.nodeRank" $own | nindent 4 }}
- name: PET_MASTER_ADDR
  value: {{ .masterAddr | quote }}
- name: PET_MASTER_PORT
  value: {{ int64 $own.Values.workload.masterPort | quote }}
- name: PET_NNODES
  value: {{ int64 $own.Values.workload.nodes | quote }}
- name: PET_NODE_RANK
  valueFrom:
    {{- include "ds-ckpt-sidecar.nodeRank" $own | nindent 4 }}
{{- else if include "ds-ckpt-sidecar.perNode" $own }}
- name: NODE_RANK
  valueFrom:
    {{- include "ds-ckpt-sidecar.nodeRank" $own | nindent 4 }}
{{- end }}
{{- if and $own.Values.workload.processesPerNode (has $own.Values.workload.kind (list "Job" "IndexedJob" "JobSet")) }}
- name: PET_NPROC_PER_NODE
  value: {{ include "ds-ckpt-sidecar.scalar" $own.Values.workload.processesPerNode | quote }}
{{- end }}
{{- end -}}

{{- define "ds-ckpt-sidecar.trainerContainer" -}}
{{- $own := .own -}}
{{- $trainer := $own.Values.trainer -}}
name: {{ .container }}
image: {{ $trainer.image | quote }}
imagePullPolicy: {{ $trainer.imagePullPolicy }}
{{- with $trainer.command }}
command:
  {{- include "ds-ckpt-sidecar.words" . | nindent 2 }}
{{- end }}
{{- with $trainer.args }}
args:
  {{- include "ds-ckpt-sidecar.words" . | nindent 2 }}
{{- end }}
{{- with $trainer.workingDir }}
workingDir: {{ . | quote }}
{{- end }}
env:
  {{- include "ds-ckpt-sidecar.trainerEnv" $own | nindent 2 }}
  {{- with include "ds-ckpt-sidecar.rendezvous" . | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with $trainer.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- $store := include "ds-ckpt-sidecar.trainerEnvFrom" $own }}
{{- if or $store $trainer.envFrom }}
envFrom:
  {{- with $store }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with $trainer.envFrom }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- with $trainer.ports }}
ports:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $trainer.resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $trainer.securityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumeMounts:
  {{- include "ds-ckpt-sidecar.trainerVolumeMounts" $own | nindent 2 }}
  {{- with $trainer.volumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "ds-ckpt-sidecar.podTemplate" -}}
{{- $own := .own -}}
{{- $pod := $own.Values.pod -}}
{{- $kind := $own.Values.workload.kind -}}
metadata:
  labels:
    {{- $ours := printf "%s\n%s" (include "ds-ckpt-sidecar.selectorLabels" $own) (include "ds-ckpt-sidecar.podLabels" $own) }}
    {{- include "ds-ckpt-sidecar.merged" (dict "given" $pod.labels "ours" $ours) | nindent 4 }}
  annotations:
    {{- $ours = printf "kubectl.kubernetes.io/default-container: %s\n%s" .container (include "ds-ckpt-sidecar.podAnnotations" $own) }}
    {{- include "ds-ckpt-sidecar.merged" (dict "given" $pod.annotations "ours" $ours) | nindent 4 }}
spec:
  {{- if ne $kind "PyTorchJob" }}
  restartPolicy: {{ $own.Values.workload.restartPolicy }}
  {{- end }}
  {{- if eq $kind "IndexedJob" }}
  subdomain: {{ include "ds-ckpt-sidecar.fullname" $own }}
  {{- end }}
  terminationGracePeriodSeconds: {{ int64 $pod.terminationGracePeriodSeconds }}
  serviceAccountName: {{ include "ds-ckpt-sidecar.serviceAccountName" $own }}
  automountServiceAccountToken: {{ $own.Values.serviceAccount.automountToken }}
  enableServiceLinks: false
  {{- with $own.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if $pod.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- with $pod.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $pod.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $pod.schedulerName }}
  schedulerName: {{ . }}
  {{- end }}
  {{- with $pod.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pod.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pod.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pod.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- include "ds-ckpt-sidecar.podSecurityContext" $own | nindent 4 }}
  {{- $init := include "ds-ckpt-sidecar.initContainers" $own | trim }}
  {{- if or $init $pod.extraInitContainers }}
  initContainers:
    {{- with $pod.extraInitContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- with $init }}
    {{- . | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    - {{ include "ds-ckpt-sidecar.trainerContainer" . | indent 6 | trim }}
    {{- with include "ds-ckpt-sidecar.containers" $own | trim }}
    {{- . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "ds-ckpt-sidecar.volumes" $own | nindent 4 }}
{{- end -}}

{{/* Metadata of the workload itself. */}}
{{- define "ds-ckpt-sidecar.workloadMetadata" -}}
name: {{ include "ds-ckpt-sidecar.workloadName" . }}
namespace: {{ .Release.Namespace }}
labels:
  {{- $ours := printf "%s\napp.kubernetes.io/component: training" (include "ds-ckpt-sidecar.labels" .) }}
  {{- include "ds-ckpt-sidecar.merged" (dict "given" .Values.workload.labels "ours" $ours) | nindent 2 }}
{{- with .Values.workload.annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The part of a Job's specification that an Indexed Job and the Jobs of a JobSet share. */}}
{{- define "ds-ckpt-sidecar.indexed" -}}
completionMode: Indexed
completions: {{ int64 .Values.workload.nodes }}
parallelism: {{ int64 .Values.workload.nodes }}
{{- end -}}

{{- define "ds-ckpt-sidecar.jobLimits" -}}
backoffLimit: {{ int64 .Values.workload.backoffLimit }}
{{- with .Values.workload.activeDeadlineSeconds }}
activeDeadlineSeconds: {{ int64 . }}
{{- end }}
{{- if semverCompare ">=1.29.0-0" .Capabilities.KubeVersion.Version }}
podReplacementPolicy: {{ .Values.workload.podReplacementPolicy }}
{{- end }}
{{- with .Values.workload.podFailurePolicy }}
podFailurePolicy:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
