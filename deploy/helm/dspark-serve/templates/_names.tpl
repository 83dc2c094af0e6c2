{{/*
The name of everything in the release. Two releases in a namespace never share one: the chart's name is always added,
and a name that had to be changed carries a hash of the whole. 40 characters leave room for what StatefulSet and
LeaderWorkerSet append to it in labels of at most 63.
*/}}
{{- define "dspark-serve.name" -}}
{{- $name := printf "%s-%s" .Release.Name .Chart.Name -}}
{{- if and (le (len $name) 40) (regexMatch "^[a-z][-a-z0-9]*$" $name) -}}
{{- $name -}}
{{- else -}}
{{- $plain := regexReplaceAll "[^-a-z0-9]" $name "-" | printf "d-%s" | trunc 31 | trimSuffix "-" -}}
{{- printf "%s-%s" $plain (sha256sum $name | trunc 8) -}}
{{- end -}}
{{- end -}}

{{/* The LeaderWorkerSet; its controller makes a headless Service of the same name. */}}
{{- define "dspark-serve.nodesName" -}}
{{- include "dspark-serve.name" . }}-nodes
{{- end -}}

{{/* The labels that tell this release's objects from any other's. They never change. */}}
{{- define "dspark-serve.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | trunc 63 | quote }}
{{- end -}}

{{- define "dspark-serve.labels" -}}
{{ include "dspark-serve.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: dspark-serve
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{- define "dspark-serve.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "dspark-serve.name" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{/* The Secret that holds the API key, or nothing. */}}
{{- define "dspark-serve.apiKeySecret" -}}
{{- if .Values.apiKey.existingSecret -}}
{{- .Values.apiKey.existingSecret -}}
{{- else if .Values.apiKey.value -}}
{{- include "dspark-serve.name" . }}-api-key
{{- end -}}
{{- end -}}

{{/* The variable that the server reads the API key from. */}}
{{- define "dspark-serve.apiKeyVariable" -}}
DSPARK_API_KEY
{{- end -}}

{{/* The Secret that holds the hub's token, or nothing. */}}
{{- define "dspark-serve.hubTokenSecret" -}}
{{- if .Values.hubToken.existingSecret -}}
{{- .Values.hubToken.existingSecret -}}
{{- else if .Values.hubToken.value -}}
{{- include "dspark-serve.name" . }}-hub-token
{{- end -}}
{{- end -}}

{{/* The claim that all pods share. */}}
{{- define "dspark-serve.sharedClaim" -}}
{{- .Values.cache.existingClaim | default (printf "%s-cache" (include "dspark-serve.name" .)) -}}
{{- end -}}

{{/* What Prometheus calls this release's scrape, as the Prometheus Operator derives it from the PodMonitor. */}}
{{- define "dspark-serve.job" -}}
{{- printf "%s/%s" .Release.Namespace (include "dspark-serve.name" .) -}}
{{- end -}}
