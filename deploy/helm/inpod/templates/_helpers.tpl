{{- define "inpod.labels" -}}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: inpod
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* (root, component, full image reference): a container's image. */}}
{{- define "inpod.image" -}}
{{- $root := index . 0 }}
{{- $image := index . 2 | default (printf "%s/%s:%s" $root.Values.hub (index . 1) (default $root.Chart.AppVersion $root.Values.tag)) -}}
image: {{ $image }}
{{- with $root.Values.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end }}

{{/* Whether to set AppArmor profiles by annotation, for servers without the field. */}}
{{- define "inpod.appArmorAnnotation" -}}
{{- if kindIs "bool" .Values.useAppArmorAnnotation }}{{ ternary "yes" "" .Values.useAppArmorAnnotation }}
{{- else if semverCompare "<1.30.0-0" .Capabilities.KubeVersion.Version }}yes{{ end }}
{{- end }}

{{/* (root, capabilities, whether AppArmor is unconfined): a container's security context. */}}
{{- define "inpod.rights" -}}
{{- $root := index . 0 -}}
securityContext:
  runAsUser: 0
  runAsGroup: 0
  runAsNonRoot: false
  privileged: false
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
    {{- with index . 1 }}
    add: [{{ join ", " . }}]
    {{- end }}
  seccompProfile: {{ default (dict "type" "RuntimeDefault") $root.Values.seccompProfile | toJson }}
  {{- with $root.Values.seLinuxOptions }}
  seLinuxOptions: {{ merge (dict) . (dict "type" "spc_t") | toJson }}
  {{- end }}
  {{- if and (index . 2) (not (include "inpod.appArmorAnnotation" $root)) }}
  appArmorProfile: {type: Unconfined}
  {{- end }}
{{- end }}

{{/* Settings as environment variables. */}}
{{- define "inpod.settings" -}}
{{- range $name, $value := . }}
- name: INPOD_{{ upper $name }}
{{- if kindIs "slice" $value }}
  {{- $scalars := true }}{{ range $value }}{{ if kindIs "map" . }}{{ $scalars = false }}{{ end }}{{ end }}
  value: {{ ternary (join "," $value) (toJson $value) $scalars | quote }}
{{- else if kindIs "float64" $value }}
  value: {{ int64 $value | quote }}
{{- else }}
  value: {{ toString $value | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* (root, the chart's settings, the user's settings of the service): a service's effective settings. */}}
{{- define "inpod.env" -}}
{{- $values := (index . 0).Values }}
{{- $common := dict "log_level" $values.logging.level "log_format" (ternary "json" "text" $values.logAsJson) "run_dir" $values.runDir }}
{{- if eq $values.topology "split" }}{{ $_ := set $common "peer" $values.splitPeer }}{{ end }}
{{- include "inpod.settings" (mergeOverwrite $common (index . 1) (deepCopy $values.settings) (deepCopy (default dict (index . 2)))) }}
{{- end }}

{{/* (root, service): where it answers probes. A pod that shares the node's network is probed at 127.0.0.1, so that no other
machine can connect; repair and the injector are probed at their pod's address, of either family. */}}
{{- define "inpod.healthAddress" -}}
{{- $offset := dict "pod-events" 0 "netconfig" 1 "ztunnel-broker" 2 "installer" 3 "repair" 4 "injector" 5 }}
{{- $address := ternary "[::]" "127.0.0.1" (has (index . 1) (list "repair" "injector")) }}
{{- printf "%s:%d" $address (add (index . 0).Values.healthPort (get $offset (index . 1))) }}
{{- end }}

{{/* (root, service): its probes, by HTTP: one that runs a program costs the node 24 ms of CPU each time. */}}
{{- define "inpod.probes" -}}
{{- $address := include "inpod.healthAddress" . }}
{{- $get := dict "port" ($address | splitList ":" | last | int) }}
{{- if hasPrefix "127." $address }}{{ $_ := set $get "host" "127.0.0.1" }}{{ end }}
startupProbe:
  httpGet: {{ merge (dict "path" "/livez") $get | toJson }}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 60
livenessProbe:
  httpGet: {{ merge (dict "path" "/livez") $get | toJson }}
  periodSeconds: 20
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet: {{ merge (dict "path" "/readyz") $get | toJson }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
{{- end }}

{{- define "inpod.resources" -}}
{{- $resources := default (index . 0).Values.resources (index . 1) }}
resources: {{ default dict $resources | toJson }}
{{- end }}

{{/* Scheduling of pods that share the node's network. */}}
{{- define "inpod.pod" -}}
hostNetwork: true
hostPID: true
{{ include "inpod.plainPod" . }}
{{- end }}

{{/* Scheduling of pods that share nothing with the node. */}}
{{- define "inpod.plainPod" -}}
dnsPolicy: Default
enableServiceLinks: false
automountServiceAccountToken: false
priorityClassName: {{ .Values.priorityClassName }}
terminationGracePeriodSeconds: {{ .Values.terminationGracePeriodSeconds }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
{{- range . }}
- name: {{ . }}
{{- end }}
{{- end }}
nodeSelector: {{ toJson .Values.nodeSelector }}
{{- with .Values.affinity }}
affinity: {{ toJson . }}
{{- end }}
tolerations:
{{- range .Values.tolerations }}
- {{ toJson . }}
{{- end }}
{{- end }}

{{- define "inpod.podLabels" -}}
sidecar.istio.io/inject: "false"
istio.io/dataplane-mode: none
{{- with .Values.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* (root, whether a container is unconfined): annotations of a pod. */}}
{{- define "inpod.podAnnotations" -}}
{{- $root := index . 0 -}}
sidecar.istio.io/inject: "false"
{{- if and (index . 1) (include "inpod.appArmorAnnotation" $root) }}
container.apparmor.security.beta.kubernetes.io/netconfig: unconfined
{{- end }}
{{- with $root.Values.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* (name, path, type): a directory of the node. */}}
{{- define "inpod.hostPath" -}}
- name: {{ index . 0 }}
  hostPath: {path: {{ index . 1 }}, type: {{ index . 2 }}}
{{- end }}

{{/* Shows a service without a token that it runs in a pod (setting peer=pod). */}}
{{- define "inpod.inPod" -}}
- {name: in-pod, mountPath: /var/run/secrets/kubernetes.io/pod, readOnly: true}
{{- end }}

{{/* Annotations of the objects that helm creates before it deletes the others. */}}
{{- define "inpod.hook" }}
  annotations:
    helm.sh/hook: pre-delete
    helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}
