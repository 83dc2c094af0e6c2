{{/*
The pod of a server, or with role worker that of a further node. Takes a dict of root ($) and role.
*/}}
{{- define "dspark-serve.pod" -}}
metadata:
  labels:
    {{- include "dspark-serve.selectorLabels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .role }}
    {{- with .root.Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    # A changed configuration or key restarts the pods, one after another.
    checksum/config: {{ include "dspark-serve.checksum" .root }}
    {{- with .root.Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "dspark-serve.podSpec" . | nindent 2 }}
{{- end -}}

{{/* Eight digits tell a change and are too few to guess a key from. */}}
{{- define "dspark-serve.checksum" -}}
{{- $parts := list (include "dspark-serve.environment" .) (toYaml .Values.customProfile) .Values.apiKey.value .Values.hubToken.value -}}
{{- toJson $parts | sha256sum | trunc 8 | quote -}}
{{- end -}}

{{- define "dspark-serve.podSpec" -}}
{{- $root := .root -}}
{{- $values := $root.Values -}}
{{- $hardware := include "dspark-serve.hardware" $root | fromYaml -}}
serviceAccountName: {{ include "dspark-serve.serviceAccountName" $root }}
automountServiceAccountToken: false
# A Service named dspark would set DSPARK_PORT.
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "dspark-serve.graceSeconds" $root }}
{{- with $values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- if $values.hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
securityContext:
  {{- include "dspark-serve.podSecurity" $root | nindent 2 }}
{{- include "dspark-serve.placement" . }}
containers:
  - name: server
    image: {{ include "dspark-serve.image" $root }}
    imagePullPolicy: {{ $values.image.pullPolicy }}
    # $(NAME) is replaced by the kubelet; the user's own words are escaped.
    args:
      {{- include "dspark-serve.arguments" . | nindent 6 }}
    envFrom:
      - configMapRef:
          name: {{ include "dspark-serve.name" $root }}-environment
    {{- with include "dspark-serve.variables" $root | trim }}
    env:
      {{- . | nindent 6 }}
    {{- end }}
    ports:
      - name: http
        containerPort: {{ int $values.port }}
    # 200 only once the model answers; until then nothing else is probed.
    startupProbe:
      httpGet:
        path: /readyz
        port: http
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: {{ mul $values.startupMinutes 6 }}
    livenessProbe:
      httpGet:
        path: /livez
        port: http
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: 3
    readinessProbe:
      httpGet:
        path: /readyz
        port: http
      periodSeconds: 5
      timeoutSeconds: 5
      failureThreshold: 2
    {{- with int (include "dspark-serve.preStopSeconds" $root) }}
    lifecycle:
      preStop:
        sleep:
          seconds: {{ . }}
    {{- end }}
    resources:
      {{- include "dspark-serve.resources" $root | nindent 6 }}
    securityContext:
      {{- include "dspark-serve.containerSecurity" $root | nindent 6 }}
    volumeMounts:
      - name: cache
        mountPath: /cache
      - name: tmp
        mountPath: /tmp
      - name: shared-memory
        mountPath: /dev/shm
      {{- if $values.customProfile }}
      - name: profile
        mountPath: /etc/dspark-serve
        readOnly: true
      {{- end }}
      {{- range $index, $device := $hardware.devices }}
      - name: device-{{ $index }}
        mountPath: {{ $device }}
      {{- end }}
      {{- range $values.extraMounts }}
      - {{ pick . "name" "mountPath" "readOnly" "subPath" | toYaml | nindent 8 | trim }}
      {{- end }}
volumes:
  {{- if eq $values.cache.mode "shared" }}
  - name: cache
    persistentVolumeClaim:
      claimName: {{ include "dspark-serve.sharedClaim" $root }}
  {{- else if eq $values.cache.mode "none" }}
  - name: cache
    emptyDir: {}
  {{- end }}
  - name: tmp
    emptyDir: {}
  - name: shared-memory
    emptyDir:
      medium: Memory
      sizeLimit: {{ $values.sharedMemory | default $hardware.sharedMemory | quote }}
  {{- if $values.customProfile }}
  - name: profile
    configMap:
      name: {{ include "dspark-serve.name" $root }}-profile
  {{- end }}
  {{- range $index, $device := $hardware.devices }}
  - name: device-{{ $index }}
    hostPath:
      path: {{ $device }}
  {{- end }}
  {{- range $values.extraMounts }}
  - {{ omit . "mountPath" "readOnly" "subPath" | toYaml | nindent 4 | trim }}
  {{- end }}
{{- end -}}

{{/* The words after `dspark-serve`. */}}
{{- define "dspark-serve.arguments" -}}
{{- $values := .root.Values -}}
{{- $several := gt (int $values.nodes) 1 -}}
{{- $words := list "up" (include "dspark-serve.profileName" .root | default "/etc/dspark-serve/profile.yaml") -}}
{{- range $values.overrides }}{{ $words = concat $words (list "--set" (replace "$(" "$$(" .)) }}{{ end -}}
{{- range $values.skipChecks }}{{ $words = concat $words (list "--skip" .) }}{{ end -}}
{{- if eq .role "worker" }}{{ $words = append $words "--headless" }}{{ end -}}
{{- if or $several $values.extraArgs }}{{ $words = append $words "--" }}{{ end -}}
{{- if $several -}}
{{- $words = concat $words (list "--nnodes" "$(LWS_GROUP_SIZE)" "--node-rank" "$(LWS_WORKER_INDEX)" "--master-addr" "$(LWS_LEADER_ADDRESS)") -}}
{{- end -}}
{{- range $values.extraArgs }}{{ $words = append $words (replace "$(" "$$(" .) }}{{ end -}}
{{- toYaml $words -}}
{{- end -}}

{{/* Variables from Secrets, and the user's own. */}}
{{- define "dspark-serve.variables" -}}
{{- with include "dspark-serve.apiKeySecret" . }}
- name: {{ include "dspark-serve.apiKeyVariable" $ }}
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $.Values.apiKey.secretKey }}
{{- end }}
{{- include "dspark-serve.hubVariables" . }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "dspark-serve.hubVariables" -}}
{{- with include "dspark-serve.hubTokenSecret" . }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $.Values.hubToken.secretKey }}
{{- end }}
{{- end -}}

{{/* The server's settings that are no secret, by their documented variables. */}}
{{- define "dspark-serve.environment" -}}
DSPARK_HOST: {{ .Values.host | quote }}
DSPARK_PORT: {{ int .Values.port | quote }}
DSPARK_VERIFICATION: {{ .Values.verification | quote }}
DSPARK_DRAIN_SECONDS: {{ int .Values.drainSeconds | quote }}
DSPARK_ACCESS_LOG: {{ .Values.accessLog | quote }}
DSPARK_METRICS_KEY: {{ .Values.metricsKey | quote }}
{{- end -}}

{{- define "dspark-serve.podSecurity" -}}
{{- $hardware := include "dspark-serve.hardware" . | fromYaml -}}
runAsNonRoot: true
{{- range $name := list "runAsUser" "runAsGroup" "fsGroup" }}
{{- $id := get $.Values.security $name }}
{{- if not (or (kindIs "invalid" $id) (kindIs "string" $id)) }}
{{ $name }}: {{ int64 $id }}
{{- end }}
{{- end }}
# A large cache is not walked through at every start.
fsGroupChangePolicy: OnRootMismatch
{{- with $hardware.supplementalGroups }}
supplementalGroups:
  {{- range . }}
  - {{ int64 . }}
  {{- end }}
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "dspark-serve.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- with .Values.security.capabilities }}
  add:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{/* On which nodes, and how far apart. */}}
{{- define "dspark-serve.placement" -}}
{{- $values := .root.Values -}}
{{- $hardware := include "dspark-serve.hardware" .root | fromYaml -}}
{{- with concat $hardware.nodeLabels $values.nodeLabels }}
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
        - matchExpressions:
            {{- toYaml . | nindent 12 }}
{{- end }}
{{- with concat $hardware.tolerations $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if $values.spread.enabled }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: {{ $values.spread.topologyKey }}
    whenUnsatisfiable: {{ $values.spread.whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- include "dspark-serve.selectorLabels" .root | nindent 8 }}
        app.kubernetes.io/component: {{ .role }}
{{- end }}
{{- end -}}
