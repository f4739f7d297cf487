{{/*
What the schema cannot see: values that do not go together. Each is refused with a sentence that
says what to change, before a cluster sees it.
*/}}
{{- define "ds-ckpt-sidecar.check" -}}
{{- include "ds-ckpt-sidecar.checkForms" . -}}
{{- include "ds-ckpt-sidecar.checkCluster" . -}}
{{- include "ds-ckpt-sidecar.checkDestination" . -}}
{{- include "ds-ckpt-sidecar.checkWorkload" . -}}
{{- include "ds-ckpt-sidecar.checkTime" . -}}
{{- include "ds-ckpt-sidecar.checkMemory" . -}}
{{- include "ds-ckpt-sidecar.checkVolume" . -}}
{{- include "ds-ckpt-sidecar.checkIdentity" . -}}
{{- include "ds-ckpt-sidecar.checkSecrets" . -}}
{{- include "ds-ckpt-sidecar.checkNames" . -}}
{{- include "ds-ckpt-sidecar.checkPorts" . -}}
{{- include "ds-ckpt-sidecar.checkPod" . -}}
{{- include "ds-ckpt-sidecar.checkMonitoring" . -}}
{{- if and .Chart.IsRoot (hasKey .Values "enabled") -}}
{{- fail "enabled is for a chart that has this one as a dependency with a condition: take it out" -}}
{{- end -}}
{{- if and .Values.noDelete (not (kindIs "invalid" .Values.agent.keepLast)) -}}
{{- fail "noDelete and agent.keepLast contradict each other: keeping the last N deletes the others. Leave one of them out" -}}
{{- end -}}
{{- end -}}

{{/* Patterns would do in the schema, and its refusals show the pattern instead of an example. */}}
{{- define "ds-ckpt-sidecar.checkForms" -}}
{{- $values := .Values -}}
{{- $sidecar := $values.sidecar.resources -}}
{{- $restore := $values.restore.resources -}}
{{- $quantities := list (list "volume.emptyDir.sizeLimit" $values.volume.emptyDir.sizeLimit) -}}
{{- range $part := list "requests" "limits" -}}
{{- $quantities = append $quantities (list (printf "sidecar.resources.%s.memory" $part) (dig $part "memory" "" $sidecar)) -}}
{{- $quantities = append $quantities (list (printf "restore.resources.%s.memory" $part) (dig $part "memory" "" $restore)) -}}
{{- end -}}
{{- $quantities = append $quantities (list "trainer.resources.limits.memory" (dig "limits" "memory" "" $values.trainer.resources)) -}}
{{- range $quantities -}}
{{- $text := include "ds-ckpt-sidecar.scalar" (last .) -}}
{{- if not (regexMatch "^([0-9]+(\\.[0-9]+)?([kMGTP]|[KMGTP]i)?)?$" $text) -}}
{{- fail (printf "%s is %q: write bytes as Kubernetes does, for instance 512Mi, 10Gi or 10G" (first .) $text) -}}
{{- end -}}
{{- end -}}
{{- with $values.volume.emptyDir.sizeLimit -}}
{{- if lt (int64 (include "ds-ckpt-sidecar.bytes" .)) 1048576 -}}
{{- fail (printf "volume.emptyDir.sizeLimit is %s bytes, which is too little for a volume: is a unit like Gi missing?" (include "ds-ckpt-sidecar.bytes" .)) -}}
{{- end -}}
{{- end -}}
{{- range list (list "agent.bandwidth" $values.agent.bandwidth) (list "restore.bandwidth" $values.restore.bandwidth) -}}
{{- $text := include "ds-ckpt-sidecar.scalar" (last . | default "") -}}
{{- if not (regexMatch "^([0-9]+(\\.[0-9]+)? ?([kKMGTP]i?)?B?(/s)?|none)?$" $text) -}}
{{- fail (printf "%s is %q: write bytes per second, for instance 500MiB, 2GB or none" (first .) $text) -}}
{{- end -}}
{{- end -}}
{{- range list (list "volume.mountPath" $values.volume.mountPath) (list "credentials.files.mountPath" $values.credentials.files.mountPath) -}}
{{- if not (regexMatch "^(/[^/:]+)+$" (last .)) -}}
{{- fail (printf "%s is %q: write an absolute path without a slash at its end or a colon, for instance /checkpoints" (first .) (last .)) -}}
{{- end -}}
{{- end -}}
{{- if regexMatch "(^|/)(\\.\\.?|)(/|$)" ($values.volume.subPath | default "x") -}}
{{- fail (printf "volume.subPath is %q: write a path below the claim's root, for instance runs/one" $values.volume.subPath) -}}
{{- end -}}
{{- range list (list "sidecar.runAsUser" $values.sidecar.runAsUser) (list "sidecar.runAsGroup" $values.sidecar.runAsGroup) (list "volume.fsGroup" $values.volume.fsGroup) -}}
{{- $text := include "ds-ckpt-sidecar.scalar" (ternary "" (last .) (kindIs "invalid" (last .))) -}}
{{- if not (regexMatch "^(|0|[1-9][0-9]{0,9})$" $text) -}}
{{- fail (printf "%s is %q: write a number, for instance 1000, which id NAME tells in the trainer's image" (first .) $text) -}}
{{- end -}}
{{- end -}}
{{- range list (list "trainer.command" $values.trainer.command) (list "trainer.args" $values.trainer.args) -}}
{{- if kindIs "string" (last .) -}}
{{- fail (printf "%s is %q: write a list of words, as --set %s='{torchrun,train.py}' does" (first .) (last .) (first .)) -}}
{{- end -}}
{{- end -}}
{{- $image := $values.image -}}
{{- if regexMatch ":[^/]*$" $image.repository -}}
{{- fail (printf "image.repository is %q, which has a tag: put that into image.tag" $image.repository) -}}
{{- end -}}
{{- if not (regexMatch "^(sha256:[0-9a-f]{64})?$" $image.digest) -}}
{{- fail (printf "image.digest is %q: write sha256: and 64 hexadecimal digits, as podman inspect --format '{{.Digest}}' IMAGE shows it" $image.digest) -}}
{{- end -}}
{{- $interval := $values.monitoring.podMonitor.interval -}}
{{- if not (regexMatch "^[1-9][0-9]*(ms|s|m|h)$" $interval) -}}
{{- fail (printf "monitoring.podMonitor.interval is %q: write a time as Prometheus does, for instance 15s" $interval) -}}
{{- end -}}
{{- range list (list "runId" $values.runId) (list "restore.tag" $values.restore.tag) (list "destination" $values.destination) -}}
{{- if regexMatch "[[:cntrl:]]" (last .) -}}
{{- fail (printf "%s is %q: take the line break, or what else cannot be printed, out" (first .) (last .)) -}}
{{- end -}}
{{- end -}}
{{- if regexMatch "(^|/)(\\.\\.?|)(/|$)" ($values.restore.tag | default "x") -}}
{{- fail (printf "restore.tag is %q, which no checkpoint can have: write a tag as the trainer saved it, for instance global_step100" $values.restore.tag) -}}
{{- end -}}
{{- $names := list (list "volume.existingClaim" $values.volume.existingClaim) (list "credentials.secret" $values.credentials.secret) (list "credentials.files.secret" $values.credentials.files.secret) (list "serviceAccount.name" $values.serviceAccount.name) (list "fullnameOverride" $values.fullnameOverride) -}}
{{- range $values.credentials.env -}}
{{- $names = append $names (list "credentials.env" .secret) -}}
{{- end -}}
{{- range $names -}}
{{- if not (regexMatch "^([a-z0-9]([-.a-z0-9]*[a-z0-9])?)?$" (last .)) -}}
{{- fail (printf "%s is %q, which cannot be a name in Kubernetes: only a-z, 0-9, - and ., and a letter or digit at both ends" (first .) (last .)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "ds-ckpt-sidecar.checkCluster" -}}
{{- if and .Values.sidecar.native (semverCompare "<1.29.0-0" .Capabilities.KubeVersion.Version) -}}
{{- fail (printf "Kubernetes %s has no native sidecars: set sidecar.native=false, or use 1.29 or newer" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- end -}}

{{- define "ds-ckpt-sidecar.checkDestination" -}}
{{- $url := .Values.destination -}}
{{- if not $url -}}
{{- fail "destination is missing: set it to where this run's checkpoints go, for instance --set destination=s3://bucket/runs/my-run" -}}
{{- end -}}
{{- if not (regexMatch "^[a-z][a-z0-9+.-]*://." $url) -}}
{{- fail (printf "destination %q is no URL: write s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///folder" $url) -}}
{{- end -}}
{{- if ne $url (trim $url) -}}
{{- fail (printf "destination %q begins or ends with a space: take it out" $url) -}}
{{- end -}}
{{- if contains "$(" $url -}}
{{- fail (printf "destination %s: Kubernetes would put a variable in place of $(...). Write it out, with helm's or your own means" $url) -}}
{{- end -}}
{{- if hasPrefix "memory:" $url -}}
{{- fail (printf "destination %s is the sidecar's own memory, and ends with it: write s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///folder" $url) -}}
{{- end -}}
{{- if regexMatch "^(s3|gs|az):///" $url -}}
{{- fail (printf "destination %s names no bucket: write it after two slashes, as %sbucket/prefix" $url (regexFind "^[a-z0-9]+://" $url)) -}}
{{- end -}}
{{- if and (hasPrefix "file://" $url) (regexMatch "/\\.\\.?(/|$)" $url) -}}
{{- fail (printf "destination %s: write the folder without . and .." $url) -}}
{{- end -}}
{{- if hasPrefix "az://" $url -}}
{{- $names := concat (keys .Values.storeEnv) (list) -}}
{{- range concat .Values.credentials.env .Values.sidecar.extraEnv -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- $given := .Values.credentials.secret -}}
{{- range list "DS_CKPT_AZURE_ACCOUNT" "DS_CKPT_AZURE_ENDPOINT" "AZURE_STORAGE_ACCOUNT" "AZURE_STORAGE_CONNECTION_STRING" -}}
{{- $given = or $given (has . $names) -}}
{{- end -}}
{{- if not $given -}}
{{- fail (printf "destination %s names a container, and nothing names its account: set storeEnv.AZURE_STORAGE_ACCOUNT, or name a secret in credentials that holds AZURE_STORAGE_CONNECTION_STRING" $url) -}}
{{- end -}}
{{- end -}}
{{- if regexMatch "^[a-z0-9+.-]+://[^/]*:[^/]*@" $url -}}
{{- fail "destination holds a password, which would be shown wherever the destination is: take it out, and name a secret in credentials" -}}
{{- end -}}
{{- if contains "?" $url -}}
{{- fail "destination has a query, and a signature there would be shown wherever the destination is: take it out, and name a secret in credentials" -}}
{{- end -}}
{{- if hasPrefix "file://" $url -}}
{{- $path := trimPrefix "file://" $url -}}
{{- $mounted := false -}}
{{- range .Values.sidecar.extraVolumeMounts -}}
{{- if hasPrefix (printf "%s/" (trimSuffix "/" .mountPath)) $path -}}
{{- $mounted = true -}}
{{- end -}}
{{- end -}}
{{- if not $mounted -}}
{{- fail (printf "destination %s: the sidecar mounts nothing there. Add the volume to pod.extraVolumes and its mount to sidecar.extraVolumeMounts, and let the destination be a folder below the mount" $url) -}}
{{- end -}}
{{- if and .Values.trainer.readsStore (ne .Values.workload.kind "none") -}}
{{- $mounted = false -}}
{{- range .Values.trainer.volumeMounts -}}
{{- if hasPrefix (printf "%s/" (trimSuffix "/" .mountPath)) $path -}}
{{- $mounted = true -}}
{{- end -}}
{{- end -}}
{{- if not $mounted -}}
{{- fail (printf "trainer.readsStore: the trainer mounts nothing at %s. Give trainer.volumeMounts the same mount as sidecar.extraVolumeMounts" $url) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "ds-ckpt-sidecar.checkWorkload" -}}
{{- $workload := .Values.workload -}}
{{- $kind := $workload.kind -}}
{{- if ne $kind "none" -}}
{{- if not .Values.trainer.image -}}
{{- fail "trainer.image is missing: set it to the image that trains, or set workload.kind=none if your own chart makes the pod" -}}
{{- end -}}
{{- end -}}
{{- if and (eq $kind "Job") (gt (int64 $workload.nodes) 1) -}}
{{- fail (printf "workload.nodes is %d and workload.kind is Job, which is one pod: set workload.kind=IndexedJob" (int64 $workload.nodes)) -}}
{{- end -}}
{{- if $workload.podFailurePolicy -}}
{{- if ne $workload.restartPolicy "Never" -}}
{{- fail "workload.podFailurePolicy needs workload.restartPolicy=Never: Kubernetes accepts it with no other" -}}
{{- end -}}
{{- if ne $workload.podReplacementPolicy "Failed" -}}
{{- fail "workload.podFailurePolicy needs workload.podReplacementPolicy=Failed: Kubernetes accepts it with no other" -}}
{{- end -}}
{{- if eq $kind "PyTorchJob" -}}
{{- fail "workload.podFailurePolicy: a PyTorchJob has none. Leave it out, or use another workload.kind" -}}
{{- end -}}
{{- end -}}
{{- if and (eq $kind "TrainJob") (has (toString $workload.processesPerNode) (list "gpu" "cpu")) -}}
{{- fail "workload.processesPerNode: a TrainJob takes a number, or auto" -}}
{{- end -}}
{{- if and (eq $kind "TrainJob") (not (kindIs "invalid" $workload.ttlSecondsAfterFinished)) -}}
{{- fail "workload.ttlSecondsAfterFinished: a TrainJob has none. Leave it out" -}}
{{- end -}}
{{- if and (not .Values.sidecar.native) (has $kind (list "PyTorchJob" "TrainJob")) -}}
{{- fail (printf "sidecar.native=false: a %s is finished when its pods are, and a plain container holds them up in ways that its controller does not expect. Use workload.kind Job, IndexedJob or JobSet" $kind) -}}
{{- end -}}
{{- if and (not .Values.sidecar.native) (eq $workload.restartPolicy "Never") (ne $kind "none") -}}
{{- fail "sidecar.native=false needs workload.restartPolicy=OnFailure: with Never a sidecar that was killed is not started again, and nothing is uploaded any more" -}}
{{- end -}}
{{- end -}}

{{- define "ds-ckpt-sidecar.checkTime" -}}
{{- $grace := int64 .Values.pod.terminationGracePeriodSeconds -}}
{{- $drain := float64 (include "ds-ckpt-sidecar.drainSeconds" .) -}}
{{- if kindIs "invalid" .Values.sidecar.drainSeconds -}}
{{- if lt $grace 15 -}}
{{- fail (printf "pod.terminationGracePeriodSeconds is %d, of which the sidecar needs 10 beside its drain: set at least 15. An eviction that gives less is not this value's matter" $grace) -}}
{{- end -}}
{{- else if lt (float64 $grace) (addf $drain 10) -}}
{{- fail (printf "sidecar.drainSeconds is %v and pod.terminationGracePeriodSeconds %d: the agent ends up to 5 s after its drain, so the grace must be at least %v. Raise it, or lower sidecar.drainSeconds" $drain $grace (addf $drain 10)) -}}
{{- end -}}
{{- end -}}

{{- define "ds-ckpt-sidecar.checkMemory" -}}
{{- $needed := add 96 (int64 (.Values.agent.memoryMib | default 32)) -}}
{{- $medium := .Values.volume.emptyDir.medium -}}
{{- $disk := 0 -}}
{{- if and (not .Values.volume.existingClaim) (eq $medium "Memory") -}}
{{- if not .Values.volume.emptyDir.sizeLimit -}}
{{- fail "volume.emptyDir.medium is Memory: set volume.emptyDir.sizeLimit too, else checkpoints take the node's memory until something is killed" -}}
{{- end -}}
{{- $disk = div (int64 (include "ds-ckpt-sidecar.bytes" .Values.volume.emptyDir.sizeLimit)) 1048576 -}}
{{- $limit := dig "resources" "limits" "memory" "" .Values.trainer -}}
{{- if and (ne .Values.workload.kind "none") $limit -}}
{{- $given := div (int64 (include "ds-ckpt-sidecar.bytes" $limit)) 1048576 -}}
{{- if le (int64 $given) (int64 $disk) -}}
{{- fail (printf "trainer.resources.limits.memory is %v, and what the trainer writes to the volume counts into it (volume.emptyDir.medium is Memory): set more than volume.emptyDir.sizeLimit, which is %v" $limit .Values.volume.emptyDir.sizeLimit) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $sidecar := .Values.sidecar.resources -}}
{{- $restore := .Values.restore.resources | default $sidecar -}}
{{- $pairs := list (list "sidecar.resources" $sidecar) -}}
{{- if .Values.restore.enabled -}}
{{- $pairs = append $pairs (list "restore.resources" $restore) -}}
{{- end -}}
{{- range $pairs -}}
{{- $name := first . -}}
{{- $resources := last . -}}
{{- if dig "limits" "ephemeral-storage" "" $resources -}}
{{- fail (printf "%s.limits: leave ephemeral-storage out. The whole pod is evicted when the trainer has filled the volume beyond it" $name) -}}
{{- end -}}
{{- with dig "limits" "memory" "" $resources -}}
{{- $given := div (int64 (include "ds-ckpt-sidecar.bytes" .)) 1048576 -}}
{{- $least := $needed -}}
{{- $why := printf "96 MiB and agent.memoryMib (%d)" (sub $needed 96) -}}
{{- if and (eq $name "restore.resources") $disk -}}
{{- $least = add $needed $disk -}}
{{- $why = printf "%s, and what it restores to a volume in memory (volume.emptyDir.sizeLimit, %v)" $why $.Values.volume.emptyDir.sizeLimit -}}
{{- end -}}
{{- if lt (int64 $given) (int64 $least) -}}
{{- fail (printf "%s.limits.memory is %v; at least %dMi are needed: %s" $name . $least $why) -}}
{{- end -}}
{{- end -}}
{{- range $what := list "memory" "cpu" -}}
{{- $request := dig "requests" $what "" $resources | default "" -}}
{{- $limit := dig "limits" $what "" $resources | default "" -}}
{{- if and $request $limit -}}
{{- $measure := printf "ds-ckpt-sidecar.%s" (ternary "millicores" "bytes" (eq $what "cpu")) -}}
{{- if gt (int64 (include $measure $request)) (int64 (include $measure $limit)) -}}
{{- fail (printf "%s.requests.%s is %s, and %s.limits.%s is %s: Kubernetes accepts no request above its limit. Raise the limit" $name $what (include "ds-ckpt-sidecar.scalar" $request) $name $what (include "ds-ckpt-sidecar.scalar" $limit)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "ds-ckpt-sidecar.checkVolume" -}}
{{- $volume := .Values.volume -}}
{{- $nodes := int64 .Values.workload.nodes -}}
{{- if and $volume.existingClaim (or $volume.emptyDir.sizeLimit $volume.emptyDir.medium) -}}
{{- fail "volume.existingClaim and volume.emptyDir are both set: leave one of them out" -}}
{{- end -}}
{{- if and $volume.subPath (not $volume.existingClaim) -}}
{{- fail "volume.subPath is a folder of volume.existingClaim, which is not set: leave it out, or name the claim" -}}
{{- end -}}
{{- if and $volume.existingClaim (gt $nodes 1) (eq .Values.workload.kind "PyTorchJob") -}}
{{- fail "volume.existingClaim: each node needs a volume of its own, and the pods of a PyTorchJob have no number to name a folder by. Use an emptyDir, or workload.kind IndexedJob, JobSet or TrainJob" -}}
{{- end -}}
{{- if and $volume.existingClaim (gt $nodes 1) (eq .Values.workload.kind "none") -}}
{{- fail "volume.existingClaim: each node needs a volume of its own, and with workload.kind=none this chart does not know how your pods are numbered. Use an emptyDir, or leave it empty and write a volume named ds-ckpt for each pod in place of ds-ckpt-sidecar.volumes" -}}
{{- end -}}
{{- range $where, $mounts := dict "sidecar.extraVolumeMounts" .Values.sidecar.extraVolumeMounts "trainer.volumeMounts" .Values.trainer.volumeMounts -}}
{{- range $mounts -}}
{{- if eq (trimSuffix "/" .mountPath) (trimSuffix "/" $volume.mountPath) -}}
{{- fail (printf "%s: %s is volume.mountPath already. Mount %s elsewhere" $where .mountPath .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if regexMatch "^/(bin|dev|etc|lib|lib64|opt|opt/ds-ckpt(/.*)?|proc|sys|usr|usr/(bin|lib|local))$" $volume.mountPath -}}
{{- fail (printf "volume.mountPath is %s: a volume there hides the program that the sidecar runs. Choose another, for instance /checkpoints" $volume.mountPath) -}}
{{- end -}}
{{- $files := .Values.credentials.files -}}
{{- $ours := dict -}}
{{- if $files.secret -}}
{{- if eq $files.mountPath $volume.mountPath -}}
{{- fail (printf "credentials.files.mountPath: %s is volume.mountPath already. Choose another" $files.mountPath) -}}
{{- end -}}
{{- $_ := set $ours $files.mountPath "credentials.files.mountPath" -}}
{{- end -}}
{{- $where := "sidecar.extraVolumeMounts" -}}
{{- include "ds-ckpt-sidecar.checkMounts" (dict "where" $where "mounts" .Values.sidecar.extraVolumeMounts "seen" (deepCopy $ours)) -}}
{{- $seen := ternary $ours (dict) .Values.trainer.readsStore -}}
{{- include "ds-ckpt-sidecar.checkMounts" (dict "where" "trainer.volumeMounts" "mounts" .Values.trainer.volumeMounts "seen" $seen) -}}
{{- end -}}

{{/* Kubernetes accepts one mount on a path. */}}
{{- define "ds-ckpt-sidecar.checkMounts" -}}
{{- range .mounts -}}
{{- $path := trimSuffix "/" .mountPath -}}
{{- with get $.seen $path -}}
{{- fail (printf "%s: %s is in %s already. Mount one of them elsewhere" $.where $path .) -}}
{{- end -}}
{{- $_ := set $.seen $path $.where -}}
{{- end -}}
{{- end -}}

{{/* The containers of a pod share its ports. */}}
{{- define "ds-ckpt-sidecar.checkPorts" -}}
{{- $port := int64 .Values.sidecar.port -}}
{{- if and (ne .Values.workload.kind "none") (gt (int64 .Values.workload.nodes) 1) (eq $port (int64 .Values.workload.masterPort)) -}}
{{- fail (printf "sidecar.port and workload.masterPort are both %d, and the containers of a pod share its ports: change one of them" $port) -}}
{{- end -}}
{{- range .Values.trainer.ports -}}
{{- if eq $port (int64 .containerPort) -}}
{{- fail (printf "trainer.ports: %d is sidecar.port, and the containers of a pod share its ports: change one of them" $port) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What passes through to the pod must not undo what the chart sets. */}}
{{- define "ds-ckpt-sidecar.checkPod" -}}
{{- $pod := .Values.pod -}}
{{- range $name := list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" "ds-ckpt.io/sidecar" -}}
{{- if hasKey $pod.labels $name -}}
{{- fail (printf "pod.labels: %s is what this release's pods are found by. Take it out" $name) -}}
{{- end -}}
{{- end -}}
{{- range $name := list "ds-ckpt.io/run-id" "ds-ckpt.io/destination" -}}
{{- if hasKey $pod.annotations $name -}}
{{- fail (printf "pod.annotations: %s is set by the chart. Take it out" $name) -}}
{{- end -}}
{{- end -}}
{{- if hasKey $pod.securityContext "fsGroup" -}}
{{- fail "pod.securityContext.fsGroup: set volume.fsGroup instead" -}}
{{- end -}}
{{- $volumes := dict -}}
{{- range $pod.extraVolumes -}}
{{- if has .name (list "ds-ckpt" "ds-ckpt-credentials" "ds-ckpt-token") -}}
{{- fail (printf "pod.extraVolumes: %s is a volume of the chart's. Give yours another name" .name) -}}
{{- end -}}
{{- if hasKey $volumes .name -}}
{{- fail (printf "pod.extraVolumes: %s is there twice. Take one of them out" .name) -}}
{{- end -}}
{{- $_ := set $volumes .name true -}}
{{- end -}}
{{- $containers := dict -}}
{{- range $pod.extraInitContainers -}}
{{- if hasKey $containers .name -}}
{{- fail (printf "pod.extraInitContainers: %s is there twice. Take one of them out" .name) -}}
{{- end -}}
{{- $_ := set $containers .name true -}}
{{- if has .name (list "ds-ckpt-restore" "ds-ckpt-sidecar" "trainer" "pytorch" "node") -}}
{{- fail (printf "pod.extraInitContainers: %s is a container of the chart's. Give yours another name" .name) -}}
{{- end -}}
{{- end -}}
{{- range $where, $mounts := dict "sidecar.extraVolumeMounts" .Values.sidecar.extraVolumeMounts "trainer.volumeMounts" .Values.trainer.volumeMounts -}}
{{- range $mounts -}}
{{- if not (or (hasKey $volumes .name) (has .name (list "ds-ckpt" "ds-ckpt-credentials"))) -}}
{{- fail (printf "%s: there is no volume %s. Add it to pod.extraVolumes" $where .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if eq .Values.workload.kind "none" -}}
{{- range $name, $value := pick $pod "labels" "annotations" "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" "schedulerName" "hostNetwork" "extraInitContainers" -}}
{{- if $value -}}
{{- fail (printf "pod.%s: with workload.kind=none the pod is your own chart's. Set it there" $name) -}}
{{- end -}}
{{- end -}}
{{- range $name, $value := pick .Values.trainer "image" "command" "args" "workingDir" "env" "envFrom" "ports" "resources" "securityContext" "volumeMounts" -}}
{{- if $value -}}
{{- fail (printf "trainer.%s: with workload.kind=none the container is your own chart's. Set it there" $name) -}}
{{- end -}}
{{- end -}}
{{- if .Values.networkPolicy.enabled -}}
{{- fail "networkPolicy.enabled: with workload.kind=none this chart does not know your pods' labels. Write the policy in your own chart" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "ds-ckpt-sidecar.checkIdentity" -}}
{{- $identity := .Values.identity -}}
{{- with $identity.awsRoleArn -}}
{{- if not (regexMatch "^arn:aws[a-z-]*:iam::[0-9]{12}:role/[^ ]+$" .) -}}
{{- fail (printf "identity.awsRoleArn is %q: write arn:aws:iam::ACCOUNT:role/NAME" .) -}}
{{- end -}}
{{- end -}}
{{- with $identity.gcpServiceAccount -}}
{{- if not (regexMatch "^[a-z0-9-]+@[a-z0-9.:-]+\\.gserviceaccount\\.com$" .) -}}
{{- fail (printf "identity.gcpServiceAccount is %q: write NAME@PROJECT.iam.gserviceaccount.com" .) -}}
{{- end -}}
{{- end -}}
{{- with $identity.azureClientId -}}
{{- if not (regexMatch "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$" .) -}}
{{- fail (printf "identity.azureClientId is %q: write the client's id, as 00000000-0000-0000-0000-000000000000" .) -}}
{{- end -}}
{{- end -}}
{{- if and $identity.awsRoleArn $identity.gcpServiceAccount -}}
{{- fail "identity.awsRoleArn and identity.gcpServiceAccount are both set, and a pod runs in one cloud: leave one of them out" -}}
{{- end -}}
{{- if and (not .Values.serviceAccount.create) (or $identity.awsRoleArn $identity.gcpServiceAccount $identity.azureClientId) -}}
{{- fail "identity stands on the service account, and serviceAccount.create is false: annotate that account yourself and leave identity out (on Azure add azure.workload.identity/use: \"true\" to pod.labels), or let it be made" -}}
{{- end -}}
{{- if and .Values.kubernetesReports.enabled (not .Values.serviceAccount.create) (not .Values.serviceAccount.name) -}}
{{- fail "kubernetesReports.enabled would give its rights to the namespace's default service account, and so to every pod of it: set serviceAccount.name, or serviceAccount.create=true" -}}
{{- end -}}
{{- end -}}

{{/* Credentials in clear end up in the release's history, in git, and in kubectl describe. */}}
{{- define "ds-ckpt-sidecar.checkSecrets" -}}
{{- range $where, $entries := dict "sidecar.extraEnv" .Values.sidecar.extraEnv "trainer.env" .Values.trainer.env -}}
{{- range $entries -}}
{{- include "ds-ckpt-sidecar.checkSecret" (dict "where" $where "name" .name "value" (.value | default "")) -}}
{{- end -}}
{{- end -}}
{{- range $name, $value := .Values.storeEnv -}}
{{- include "ds-ckpt-sidecar.checkSecret" (dict "where" "storeEnv" "name" $name "value" $value) -}}
{{- end -}}
{{- end -}}

{{- define "ds-ckpt-sidecar.checkSecret" -}}
{{- $value := toString .value -}}
{{- $named := regexMatch "(?i)(PASSW(OR)?D|PASSPHRASE|SECRET|CREDENTIALS|CONNECTION_STRING|(ACCESS|ACCOUNT|API|AUTH|AWS|AZURE|CLIENT|DEPLOY|ENCRYPTION|GCP|GOOGLE|HF|LICEN[CS]E|MASTER|NGC|OPENAI|PRIVATE|SECRET|SERVICE|SIGNING|SSH|STORAGE|WANDB)_?KEY(_ID)?|(^|_)SAS|(^|_)TOKEN|(ADMIN|DB|FTP|HTTP|LOGIN|MONGO|MYSQL|PG|POSTGRES|PROXY|REDIS|REGISTRY|ROOT|SMB|SMTP|SQL|SSH|USER)_?PASS)$" .name -}}
{{- $known := or (has .name (list "GOOGLE_APPLICATION_CREDENTIALS")) (regexMatch "(?i)(^|_)(AUDIO|BEGIN|BOS|CLS|END|EOS|IMAGE|MASK|NEXT|PAD|PER|SEP|SPECIAL|START|STOP|UNK|VIDEO)_TOKEN$" .name) -}}
{{- $looks := regexMatch "AKIA[0-9A-Z]{16}|ASIA[0-9A-Z]{16}|-----BEGIN [A-Z ]*PRIVATE KEY|(Account|SharedAccess)(Key|Signature)=|[?&]sig=|://[^/]*:[^/]*@|(?i)\"[a-z_]*(password|secret|token|private_key)[a-z_]*\" *:" $value -}}
{{- if and $value (or (and $named (not $known)) $looks) -}}
{{- fail (printf "%s: %s holds a credential in clear, which would be kept in the release and shown by kubectl describe. Put it into a Secret and name that in credentials, or by valueFrom.secretKeyRef; better, use a workload identity" .where .name) -}}
{{- end -}}
{{- end -}}

{{/* The last of two variables of one name would win in silence, or the API refuse it. */}}
{{- define "ds-ckpt-sidecar.checkNames" -}}
{{- $agents := dict "DS_CKPT_VOLUME" "volume.mountPath" "DS_CKPT_DESTINATION" "destination" "DS_CKPT_RUN_ID" "runId" "DS_CKPT_LISTEN" "sidecar.port" "DS_CKPT_DRAIN_SECONDS" "sidecar.drainSeconds" "DS_CKPT_LOG_FORMAT" "json, always" "DS_CKPT_EXIT_WHEN_FINISHED" "sidecar.native" "DS_CKPT_TRAINER_GONE_SECONDS" "sidecar.trainerGoneSeconds" "DS_CKPT_KUBERNETES" "kubernetesReports.enabled" "DS_CKPT_VOLUME_LIMIT" "volume.emptyDir.sizeLimit" "DS_CKPT_JOURNAL" "the volume, always" "DS_CKPT_ONCE" "never" -}}
{{- /* Not keys of .Values.agent: helm 4 leaves out those that are null. */ -}}
{{- range list "keepLast" "keepLocal" "retentionPause" "order" "streams" "partMib" "memoryMib" "bandwidth" "stallSeconds" "pageCache" "priority" "rescanSeconds" "leaseStaleSeconds" "abandonSeconds" "allowWeakStore" -}}
{{- $_ := set $agents (printf "DS_CKPT_%s" (snakecase . | upper)) (printf "agent.%s" .) -}}
{{- end -}}
{{- range list "POD_NAME" "POD_NAMESPACE" "POD_UID" "NODE_NAME" "NODE_RANK" -}}
{{- $_ := set $agents . "the pod itself" -}}
{{- end -}}
{{- $seen := dict -}}
{{- range $name, $_ := .Values.storeEnv -}}
{{- include "ds-ckpt-sidecar.checkName" (dict "where" "storeEnv" "name" $name "set" $agents "seen" $seen) -}}
{{- end -}}
{{- range .Values.credentials.env -}}
{{- include "ds-ckpt-sidecar.checkName" (dict "where" "credentials.env" "name" .name "set" $agents "seen" $seen) -}}
{{- end -}}
{{- $store := deepCopy $seen -}}
{{- range .Values.sidecar.extraEnv -}}
{{- include "ds-ckpt-sidecar.checkName" (dict "where" "sidecar.extraEnv" "name" .name "set" $agents "seen" $seen) -}}
{{- end -}}
{{- $trainers := dict "DS_CKPT_DIR" "volume.mountPath" "DS_CKPT_RUN_ID" "runId" "DS_CKPT_GRACE" "pod.terminationGracePeriodSeconds" "DS_CKPT_DESTINATION" "trainer.readsStore and destination" -}}
{{- if has .Values.workload.kind (list "IndexedJob" "JobSet") -}}
{{- range list "MASTER_ADDR" "NODE_RANK" "PET_MASTER_ADDR" "PET_NODE_RANK" -}}
{{- $_ := set $trainers . "workload.kind" -}}
{{- end -}}
{{- range list "NNODES" "PET_NNODES" -}}
{{- $_ := set $trainers . "workload.nodes" -}}
{{- end -}}
{{- range list "MASTER_PORT" "PET_MASTER_PORT" -}}
{{- $_ := set $trainers . "workload.masterPort" -}}
{{- end -}}
{{- end -}}
{{- if .Values.workload.processesPerNode -}}
{{- $_ := set $trainers "PET_NPROC_PER_NODE" "workload.processesPerNode" -}}
{{- end -}}
{{- $seen = ternary $store (dict) .Values.trainer.readsStore -}}
{{- range .Values.trainer.env -}}
{{- include "ds-ckpt-sidecar.checkName" (dict "where" "trainer.env" "name" .name "set" $trainers "seen" $seen) -}}
{{- end -}}
{{- end -}}

{{- define "ds-ckpt-sidecar.checkName" -}}
{{- with get .set .name -}}
{{- fail (printf "%s: %s is set by the chart, from %s. Take it out there" $.where $.name .) -}}
{{- end -}}
{{- with get .seen .name -}}
{{- fail (printf "%s: %s is set in %s already. Take one of them out" $.where $.name .) -}}
{{- end -}}
{{- $_ := set .seen .name .where -}}
{{- end -}}

{{- define "ds-ckpt-sidecar.checkMonitoring" -}}
{{- $monitoring := .Values.monitoring -}}
{{- if and $monitoring.podMonitor.enabled (eq .Values.workload.kind "none") -}}
{{- fail "monitoring.podMonitor.enabled: with workload.kind=none this release has no pods to select. Leave it out, and make a PodMonitor of your own for port ds-ckpt of pods with the label ds-ckpt.io/sidecar" -}}
{{- end -}}
{{- if and $monitoring.podMonitor.fromNamespace (not (and $monitoring.podMonitor.enabled .Values.networkPolicy.enabled)) -}}
{{- fail "monitoring.podMonitor.fromNamespace is whom networkPolicy lets in, and does nothing unless monitoring.podMonitor.enabled and networkPolicy.enabled are set: set both, or leave it out" -}}
{{- end -}}
{{- range $part := list "podMonitor" "rules" "dashboard" -}}
{{- range $name, $_ := (get $monitoring $part).labels -}}
{{- if hasPrefix "app.kubernetes.io/" $name -}}
{{- fail (printf "monitoring.%s.labels: %s is set by the chart. Take it out" $part $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
