{{/*
Names, labels, and the small conversions that other templates need.

Every template takes the chart's own context. Those in _library.tpl take a user's context as well.
*/}}

{{/* The release, and the alias if it is a dependency under one: a chart may have two of them. */}}
{{- define "ds-ckpt-sidecar.release" -}}
{{- if eq .Chart.Name "ds-ckpt-sidecar" -}}
{{- .Release.Name -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name -}}
{{- end -}}
{{- end -}}

{{/*
At most 36 characters, so that a JobSet's longest pod name fits into 63; two long names stay two. A
letter comes first: a release may begin with a digit, and a Service may not.
*/}}
{{- define "ds-ckpt-sidecar.fullname" -}}
{{- $name := .Values.fullnameOverride -}}
{{- if not $name -}}
{{- $name = include "ds-ckpt-sidecar.release" . | lower | replace "_" "-" -}}
{{- if and (eq .Values.workload.kind "none") (eq .Chart.Name "ds-ckpt-sidecar") -}}
{{- $name = printf "%s-ds-ckpt" .Release.Name -}}
{{- end -}}
{{- end -}}
{{- $name = $name | replace "." "-" -}}
{{- if regexMatch "^[0-9]" $name -}}
{{- $name = printf "run-%s" $name -}}
{{- end -}}
{{- if gt (len $name) 36 -}}
{{- $name = printf "%s-%s" ($name | trunc 27 | trimSuffix "-") (sha256sum $name | trunc 8) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{- define "ds-ckpt-sidecar.runId" -}}
{{- .Values.runId | default (include "ds-ckpt-sidecar.release" .) -}}
{{- end -}}

{{- define "ds-ckpt-sidecar.serviceAccountName" -}}
{{- if .Values.serviceAccount.name -}}
{{- .Values.serviceAccount.name -}}
{{- else if .Values.serviceAccount.create -}}
{{- include "ds-ckpt-sidecar.fullname" . -}}
{{- else -}}
default
{{- end -}}
{{- end -}}

{{- define "ds-ckpt-sidecar.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository ($image.tag | default .Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/* What selects this release's training pods, and is the same for ever. */}}
{{- define "ds-ckpt-sidecar.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name | trunc 63 | quote }}
app.kubernetes.io/instance: {{ .Release.Name | trunc 63 | quote }}
app.kubernetes.io/component: training
{{- end -}}

{{/* Of everything but pods: what changes with the chart's version must not change a pod's template. */}}
{{- define "ds-ckpt-sidecar.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name | trunc 63 | quote }}
app.kubernetes.io/instance: {{ .Release.Name | trunc 63 | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" | quote }}
{{- end -}}

{{/* Labels or annotations of ours under the user's, which win: a key given twice is no YAML. */}}
{{- define "ds-ckpt-sidecar.merged" -}}
{{- toYaml (merge (deepCopy .given) (fromYaml .ours)) -}}
{{- end -}}

{{/* A number or a word as an environment variable has it: 1e+06 would be no count. */}}
{{- define "ds-ckpt-sidecar.scalar" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) -}}
{{- printf "%.0f" . -}}
{{- else -}}
{{- toString . -}}
{{- end -}}
{{- end -}}

{{/* A user or group; empty if none is to be set. */}}
{{- define "ds-ckpt-sidecar.id" -}}
{{- if not (or (kindIs "invalid" .) (eq (toString .) "")) -}}
{{- int64 . -}}
{{- end -}}
{{- end -}}

{{/* A command's words, each as text: --set makes numbers of some. One text alone is refused elsewhere. */}}
{{- define "ds-ckpt-sidecar.words" -}}
{{- $words := list -}}
{{- range ternary (list) . (kindIs "string" .) -}}
{{- $words = append $words (include "ds-ckpt-sidecar.scalar" .) -}}
{{- end -}}
{{- toYaml $words -}}
{{- end -}}

{{/* Bytes of a quantity such as 256Mi. */}}
{{- define "ds-ckpt-sidecar.bytes" -}}
{{- $text := include "ds-ckpt-sidecar.scalar" . -}}
{{- $number := regexFind "^[0-9]+(\\.[0-9]+)?" $text -}}
{{- $factors := dict "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 -}}
{{- printf "%.0f" (mulf (float64 $number) (float64 (get $factors (trimPrefix $number $text)))) -}}
{{- end -}}

{{/* Thousandths of a processor. */}}
{{- define "ds-ckpt-sidecar.millicores" -}}
{{- $text := include "ds-ckpt-sidecar.scalar" . -}}
{{- printf "%.0f" (mulf (float64 (trimSuffix "m" $text)) (ternary 1.0 1000.0 (hasSuffix "m" $text))) -}}
{{- end -}}

{{/* Seconds from SIGTERM that the agent may use: the grace, less 5 s of overtime and 5 s to be sure. */}}
{{- define "ds-ckpt-sidecar.drainSeconds" -}}
{{- if kindIs "invalid" .Values.sidecar.drainSeconds -}}
{{- sub (int64 .Values.pod.terminationGracePeriodSeconds) 10 -}}
{{- else -}}
{{- include "ds-ckpt-sidecar.scalar" .Values.sidecar.drainSeconds -}}
{{- end -}}
{{- end -}}
