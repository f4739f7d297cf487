{{/*
What another chart includes. Give each of them that chart's own context (".") if this chart is its
dependency under its own name, or the dependency's context (index .Subcharts "alias") if it has
another. Settings are those under the dependency's name in the values.

Whole pieces, for three lines in a pod's template:
  ds-ckpt-sidecar.podMetadata   labels and annotations
  ds-ckpt-sidecar.podSpec       init containers, volumes, security context, grace, service account
  ds-ckpt-sidecar.trainer       env, envFrom and volumeMounts of the container that trains
Single lists, for a pod that has such lists already:
  ds-ckpt-sidecar.initContainers, .containers (empty for a native sidecar), .sidecarContainer,
  .restoreContainer, .volumes, .trainerEnv, .trainerEnvFrom, .trainerVolumeMounts, .podLabels,
  .podAnnotations, .podSecurityContext
*/}}

{{- define "ds-ckpt-sidecar.resolve" -}}
{{- $own := .given | default dict -}}
{{- with $own.Subcharts -}}
{{- with index . "ds-ckpt-sidecar" -}}
{{- $own = . -}}
{{- end -}}
{{- end -}}
{{- if not (hasKey ($own.Values | default dict) "kubernetesReports") -}}
{{- fail "ds-ckpt-sidecar: the context that a template of this chart was given is not this chart's. If the dependency has an alias, give (index .Subcharts \"alias\") in place of the dot; if its condition may switch it off, put the includes into an if on the same value" -}}
{{- end -}}
{{- $_ := set . "own" $own -}}
{{- end -}}

{{- define "ds-ckpt-sidecar.sidecarContainer" -}}
{{- $box := dict "given" . -}}
{{- include "ds-ckpt-sidecar.resolve" $box -}}
{{- include "ds-ckpt-sidecar.agent" $box.own -}}
{{- end -}}

{{- define "ds-ckpt-sidecar.restoreContainer" -}}
{{- $box := dict "given" . -}}
{{- include "ds-ckpt-sidecar.resolve" $box -}}
{{- include "ds-ckpt-sidecar.restore" $box.own -}}
{{- end -}}

{{- define "ds-ckpt-sidecar.initContainers" -}}
{{- $box := dict "given" . -}}
{{- include "ds-ckpt-sidecar.resolve" $box -}}
{{- if $box.own.Values.restore.enabled }}
- {{ include "ds-ckpt-sidecar.restore" $box.own | indent 2 | trim }}
{{- end }}
{{- if $box.own.Values.sidecar.native }}
- {{ include "ds-ckpt-sidecar.agent" $box.own | indent 2 | trim }}
{{- end }}
{{- end -}}

{{- define "ds-ckpt-sidecar.containers" -}}
{{- $box := dict "given" . -}}
{{- include "ds-ckpt-sidecar.resolve" $box -}}
{{- if not $box.own.Values.sidecar.native }}
- {{ include "ds-ckpt-sidecar.agent" $box.own | indent 2 | trim }}
{{- end }}
{{- end -}}

{{- define "ds-ckpt-sidecar.volumes" -}}
{{- $box := dict "given" . -}}
{{- include "ds-ckpt-sidecar.resolve" $box -}}
{{- $values := $box.own.Values -}}
- name: ds-ckpt
{{- if $values.volume.existingClaim }}
  persistentVolumeClaim:
    claimName: {{ $values.volume.existingClaim }}
{{- else if or $values.volume.emptyDir.sizeLimit $values.volume.emptyDir.medium }}
  emptyDir:
    {{- with $values.volume.emptyDir.medium }}
    medium: {{ . }}
    {{- end }}
    {{- with $values.volume.emptyDir.sizeLimit }}
    sizeLimit: {{ include "ds-ckpt-sidecar.scalar" . | quote }}
    {{- end }}
{{- else }}
  emptyDir: {}
{{- end }}
{{- with $values.credentials.files.secret }}
- name: ds-ckpt-credentials
  secret:
    secretName: {{ . }}
    defaultMode: {{ ternary "0444" "0440" (empty (include "ds-ckpt-sidecar.id" $values.volume.fsGroup)) }} # without a group only others can read it
{{- end }}
{{- if $values.kubernetesReports.enabled }}
# What automounting would give to every container, for the sidecar alone.
- name: ds-ckpt-token
  projected:
    defaultMode: 0644
    sources:
      - serviceAccountToken:
          path: token
          expirationSeconds: 3607
      - configMap:
          name: kube-root-ca.crt
          items:
            - key: ca.crt
              path: ca.crt
      - downwardAPI:
          items:
            - path: namespace
              fieldRef:
                fieldPath: metadata.namespace
{{- end }}
{{- with $values.pod.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "ds-ckpt-sidecar.trainerEnv" -}}
{{- $box := dict "given" . -}}
{{- include "ds-ckpt-sidecar.resolve" $box -}}
- name: DS_CKPT_DIR
  value: {{ $box.own.Values.volume.mountPath | quote }}
- name: DS_CKPT_RUN_ID
  value: {{ include "ds-ckpt-sidecar.runId" $box.own | quote }}
- name: DS_CKPT_GRACE
  value: {{ $box.own.Values.pod.terminationGracePeriodSeconds | int64 | quote }}
{{- if $box.own.Values.trainer.readsStore }}
- name: DS_CKPT_DESTINATION
  value: {{ $box.own.Values.destination | quote }}
{{- include "ds-ckpt-sidecar.storeEnv" $box.own }}
{{- end }}
{{- end -}}

{{- define "ds-ckpt-sidecar.trainerEnvFrom" -}}
{{- $box := dict "given" . -}}
{{- include "ds-ckpt-sidecar.resolve" $box -}}
{{- if $box.own.Values.trainer.readsStore -}}
{{- include "ds-ckpt-sidecar.storeEnvFrom" $box.own | trim -}}
{{- end -}}
{{- end -}}

{{- define "ds-ckpt-sidecar.trainerVolumeMounts" -}}
{{- $box := dict "given" . -}}
{{- include "ds-ckpt-sidecar.resolve" $box -}}
- {{ include "ds-ckpt-sidecar.mount" $box.own | indent 2 | trim }}
{{- if $box.own.Values.trainer.readsStore }}
{{- include "ds-ckpt-sidecar.storeMounts" $box.own }}
{{- end }}
{{- end -}}

{{- define "ds-ckpt-sidecar.podLabels" -}}
{{- $box := dict "given" . -}}
{{- include "ds-ckpt-sidecar.resolve" $box -}}
ds-ckpt.io/sidecar: "true"
{{- if $box.own.Values.identity.azureClientId }}
azure.workload.identity/use: "true"
{{- end }}
{{- end -}}

{{- define "ds-ckpt-sidecar.podAnnotations" -}}
{{- $box := dict "given" . -}}
{{- include "ds-ckpt-sidecar.resolve" $box -}}
ds-ckpt.io/run-id: {{ include "ds-ckpt-sidecar.runId" $box.own | quote }}
ds-ckpt.io/destination: {{ $box.own.Values.destination | quote }}
{{- end -}}

{{- define "ds-ckpt-sidecar.podSecurityContext" -}}
{{- $box := dict "given" . -}}
{{- include "ds-ckpt-sidecar.resolve" $box -}}
{{- $context := dict "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- with include "ds-ckpt-sidecar.id" $box.own.Values.volume.fsGroup -}}
{{- $context = merge (dict "fsGroup" (int64 .) "fsGroupChangePolicy" "OnRootMismatch") $context -}}
{{- end -}}
{{- toYaml (merge (deepCopy $box.own.Values.pod.securityContext) $context) -}}
{{- end -}}

{{- define "ds-ckpt-sidecar.podMetadata" -}}
labels:
  {{- include "ds-ckpt-sidecar.podLabels" . | nindent 2 }}
annotations:
  {{- include "ds-ckpt-sidecar.podAnnotations" . | nindent 2 }}
{{- end -}}

{{- define "ds-ckpt-sidecar.podSpec" -}}
{{- $box := dict "given" . -}}
{{- include "ds-ckpt-sidecar.resolve" $box -}}
{{- if not $box.own.Values.sidecar.native -}}
{{- fail "ds-ckpt-sidecar.podSpec holds no containers, and sidecar.native=false makes the sidecar one: use ds-ckpt-sidecar.initContainers, .containers, .volumes and .podSecurityContext instead" -}}
{{- end -}}
serviceAccountName: {{ include "ds-ckpt-sidecar.serviceAccountName" $box.own }}
automountServiceAccountToken: {{ $box.own.Values.serviceAccount.automountToken }}
terminationGracePeriodSeconds: {{ int64 $box.own.Values.pod.terminationGracePeriodSeconds }}
{{- with $box.own.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- include "ds-ckpt-sidecar.podSecurityContext" . | nindent 2 }}
initContainers:
  {{- include "ds-ckpt-sidecar.initContainers" . | trim | nindent 2 }}
volumes:
  {{- include "ds-ckpt-sidecar.volumes" . | nindent 2 }}
{{- end -}}

{{- define "ds-ckpt-sidecar.trainer" -}}
env:
  {{- include "ds-ckpt-sidecar.trainerEnv" . | nindent 2 }}
{{- with include "ds-ckpt-sidecar.trainerEnvFrom" . }}
envFrom:
  {{- . | nindent 2 }}
{{- end }}
volumeMounts:
  {{- include "ds-ckpt-sidecar.trainerVolumeMounts" . | nindent 2 }}
{{- end -}}
