{{- define "ds-ckpt-sidecar.check" -}}
{{- end -}}
