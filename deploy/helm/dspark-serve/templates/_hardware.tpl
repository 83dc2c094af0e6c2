{{/* What the selected hardware stands for, as YAML. */}}
{{- define "dspark-serve.hardware" -}}
{{- index .Values.perHardware .Values.hardware | toYaml -}}
{{- end -}}

{{- define "dspark-serve.image" -}}
{{- $hardware := include "dspark-serve.hardware" . | fromYaml -}}
{{- $repository := .Values.image.repository | default $hardware.repository -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" $repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (.Values.image.tag | default (printf "%s-%s" .Values.hardware .Chart.AppVersion)) -}}
{{- end -}}
{{- end -}}

{{/* The bundled profile's name; nothing with a custom one. */}}
{{- define "dspark-serve.profileName" -}}
{{- if not .Values.customProfile -}}
{{- .Values.profile | default (include "dspark-serve.hardware" . | fromYaml).profile -}}
{{- end -}}
{{- end -}}

{{/* What the chart knows of the profile: hardware, gpus, models and parallel sizes (files/profiles.yaml has the bundled ones). */}}
{{- define "dspark-serve.profileFacts" -}}
{{- if .Values.customProfile -}}
{{- $custom := .Values.customProfile -}}
hardware: {{ $custom.hardware }}
gpus: {{ $custom.gpus | default 0 }}
engine_args: {{ $custom.engine_args | default dict | toJson }}
models:
  - repository: {{ $custom.model }}
    revision: {{ $custom.revision | default "" | quote }}
  {{- with (($custom.speculative_config).model) }}
  - repository: {{ . }}
    revision: {{ $custom.speculative_config.revision | default "" | quote }}
  {{- end }}
{{- else -}}
{{- index (.Files.Get "files/profiles.yaml" | fromYaml) (include "dspark-serve.profileName" .) | toYaml -}}
{{- end -}}
{{- end -}}

{{/* GPUs that the ranks need together: the profile's parallel sizes, as overrides and extraArgs change them. Nothing where
that is more than a product of three numbers. */}}
{{- define "dspark-serve.ranks" -}}
{{- $words := concat .Values.overrides .Values.extraArgs | join " " -}}
{{- if not (regexMatch "(data[-_]parallel[-_]size[-_]local|-dpl)[ =]" $words) -}}
{{- $sizes := dict -}}
{{- range $name, $size := (include "dspark-serve.profileFacts" . | fromYaml).engine_args -}}
{{- if regexMatch "^(tensor|pipeline|data)_parallel_size$" $name }}{{ $_ := set $sizes (trunc 1 $name) (int $size) }}{{ end -}}
{{- end -}}
{{- range regexFindAll "(^| )((--|engine_args.)?(tensor|pipeline|data)[-_]parallel[-_]size|-(tp|pp|dp))[ =][0-9]+" $words -1 -}}
{{- $_ := set $sizes (regexFind "[tpd]" (replace "engine_args." "" .)) (regexFind "[0-9]+$" . | int) -}}
{{- end -}}
{{- mul (get $sizes "t" | default 1) (get $sizes "p" | default 1) (get $sizes "d" | default 1) -}}
{{- end -}}
{{- end -}}

{{/* GPUs of one pod. preflight.yaml has made sure that the profile's can be split. */}}
{{- define "dspark-serve.gpus" -}}
{{- if kindIs "invalid" .Values.gpusPerNode -}}
{{- div (include "dspark-serve.profileFacts" . | fromYaml).gpus .Values.nodes -}}
{{- else -}}
{{- .Values.gpusPerNode -}}
{{- end -}}
{{- end -}}

{{/* CPU, memory and GPUs of one pod. */}}
{{- define "dspark-serve.resources" -}}
{{- $hardware := include "dspark-serve.hardware" . | fromYaml -}}
{{- $resources := deepCopy (.Values.resources | default $hardware.resources) -}}
{{- $gpus := int (include "dspark-serve.gpus" .) -}}
{{- if and $hardware.resourceName $gpus -}}
{{- $limits := set ($resources.limits | default dict) $hardware.resourceName $gpus -}}
{{- $resources = set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* How long a stopped pod keeps answering, so that every load balancer has heard of it: a quarter of the drain. */}}
{{- define "dspark-serve.preStopSeconds" -}}
{{- min 10 (div .Values.drainSeconds 4) -}}
{{- end -}}

{{/* preStop, the drain, and 45 seconds for the server to end connections, engine and processes. */}}
{{- define "dspark-serve.graceSeconds" -}}
{{- add (include "dspark-serve.preStopSeconds" .) .Values.drainSeconds 45 -}}
{{- end -}}

{{/* ReadWriteOnce for a claim of one pod, ReadWriteMany for a shared one, unless values say otherwise. */}}
{{- define "dspark-serve.claimSpec" -}}
accessModes:
{{- toYaml (.Values.cache.accessModes | default (list (ternary "ReadWriteMany" "ReadWriteOnce" (eq .Values.cache.mode "shared")))) | nindent 2 }}
{{- with .Values.cache.storageClassName }}
storageClassName: {{ . | quote }}
{{- end }}
resources:
  requests:
    storage: {{ .Values.cache.size | default (include "dspark-serve.hardware" . | fromYaml).cacheSize | quote }}
{{- end -}}

{{/* StatefulSet, Deployment or LeaderWorkerSet. */}}
{{- define "dspark-serve.workload" -}}
{{- if gt (int .Values.nodes) 1 -}}
LeaderWorkerSet
{{- else if eq .Values.cache.mode "perReplica" -}}
StatefulSet
{{- else -}}
Deployment
{{- end -}}
{{- end -}}

{{/* The workload, as an autoscaler refers to it. */}}
{{- define "dspark-serve.scaleTarget" -}}
{{- $kind := include "dspark-serve.workload" . -}}
apiVersion: {{ ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" (eq $kind "LeaderWorkerSet") }}
kind: {{ $kind }}
name: {{ ternary (include "dspark-serve.nodesName" .) (include "dspark-serve.name" .) (eq $kind "LeaderWorkerSet") }}
{{- end -}}
