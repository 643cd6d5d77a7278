{{- define "inpod.podEvents" -}}
{{- $values := .Values }}
{{- $settings := dict "pods_from" "kubernetes" "exclude_namespaces" $values.excludeNamespaces "plugin_state_dir" (printf "%s/plugin" $values.stateDir) "ztunnel_pods" $values.ztunnelPods "dns_capture" $values.ambient.dnsCapture "ipv6_capture" (ternary "auto" "off" $values.ambient.ipv6) "metrics_address" $values.metrics.address "health_address" (include "inpod.healthAddress" (list . "pod-events")) }}
{{- with $values.ambient.enablementSelectors }}{{ $_ := set $settings "enablement_selectors" . }}{{ end }}
{{- with $values.startupTaints }}{{ $_ := set $settings "startup_taints" . }}{{ end }}
{{- if $values.repair.enabled }}{{ $_ := set $settings "peer" $values.splitPeer }}{{ end }}
- name: pod-events
  {{- include "inpod.image" (list . "pod-events" $values.podEvents.image) | nindent 2 }}
  env:
  - name: INPOD_NODE_NAME
    valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
  {{- include "inpod.env" (list . $settings $values.podEvents.settings) | trim | nindent 2 }}
  {{- if $values.metrics.podMonitor.enabled }}
  ports:
  - {name: metrics, containerPort: {{ $values.metrics.address | splitList ":" | last }}, protocol: TCP}
  {{- end }}
  {{- include "inpod.probes" (list . "pod-events") | trim | nindent 2 }}
  {{- include "inpod.resources" (list . $values.podEvents.resources) | trim | nindent 2 }}
  {{- include "inpod.rights" (list . list false) | nindent 2 }}
  terminationMessagePolicy: {{ $values.terminationMessagePolicy }}
  volumeMounts:
  - {name: pod-events, mountPath: {{ $values.runDir }}/pod-events}
  - {name: netconfig, mountPath: {{ $values.runDir }}/netconfig, readOnly: true}
  - {name: ztunnel-broker, mountPath: {{ $values.runDir }}/ztunnel-broker, readOnly: true}
  - {name: installer, mountPath: {{ $values.runDir }}/installer, readOnly: true}
  {{- if $values.repair.enabled }}
  - {name: repair, mountPath: {{ $values.runDir }}/repair, readOnly: true}
  {{- end }}
  - {name: plugin-state, mountPath: {{ $values.stateDir }}/plugin}
  - {name: leave, mountPath: /etc/inpod/leave, readOnly: true}
  - {name: token, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
{{- end }}

{{- define "inpod.netconfig" -}}
{{- $values := .Values }}
{{- $usual := eq $values.cniNetnsDir "/var/run/netns" }}
{{- $roots := ternary (list "/run/netns" "/var/run/netns" "/proc") (list $values.cniNetnsDir "/proc") $usual }}
- name: netconfig
  {{- include "inpod.image" (list . "netconfig" $values.netconfig.image) | nindent 2 }}
  env:
  {{- include "inpod.env" (list . (dict "netns_roots" $roots "health_address" (include "inpod.healthAddress" (list . "netconfig"))) $values.netconfig.settings) | trim | nindent 2 }}
  {{- include "inpod.probes" (list . "netconfig") | trim | nindent 2 }}
  {{- include "inpod.resources" (list . $values.netconfig.resources) | trim | nindent 2 }}
  {{- include "inpod.rights" (list . (list "NET_ADMIN" "NET_BROADCAST" "SYS_ADMIN" "SYS_PTRACE") true) | nindent 2 }}
  terminationMessagePolicy: {{ $values.terminationMessagePolicy }}
  volumeMounts:
  - {name: netconfig, mountPath: {{ $values.runDir }}/netconfig}
  - {name: netns-socket, mountPath: {{ $values.runDir }}/netns}
  - {name: netns, mountPath: {{ $values.cniNetnsDir }}, mountPropagation: HostToContainer, readOnly: true}
  {{- if $usual }}
  - {name: netns, mountPath: /run/netns, mountPropagation: HostToContainer, readOnly: true}
  {{- end }}
  {{- include "inpod.inPod" . | trim | nindent 2 }}
{{- end }}

{{- define "inpod.ztunnelBroker" -}}
{{- $values := .Values }}
- name: ztunnel-broker
  {{- include "inpod.image" (list . "ztunnel-broker" $values.ztunnelBroker.image) | nindent 2 }}
  env:
  {{- include "inpod.env" (list . (dict "zds_socket" (printf "%s/ztunnel.sock" $values.ztunnelDir) "health_address" (include "inpod.healthAddress" (list . "ztunnel-broker"))) $values.ztunnelBroker.settings) | trim | nindent 2 }}
  {{- include "inpod.probes" (list . "ztunnel-broker") | trim | nindent 2 }}
  {{- include "inpod.resources" (list . $values.ztunnelBroker.resources) | trim | nindent 2 }}
  {{- include "inpod.rights" (list . list false) | nindent 2 }}
  terminationMessagePolicy: {{ $values.terminationMessagePolicy }}
  volumeMounts:
  - {name: ztunnel-broker, mountPath: {{ $values.runDir }}/ztunnel-broker}
  - {name: netns-socket, mountPath: {{ $values.runDir }}/netns, readOnly: true}
  - {name: ztunnel, mountPath: {{ $values.ztunnelDir }}}
  {{- include "inpod.inPod" . | trim | nindent 2 }}
{{- end }}

{{- define "inpod.installer" -}}
{{- $values := .Values }}
{{- $mode := ternary (ternary "owned" "in-place" $values.istioOwnedCNIConfig) "standalone" $values.chained }}
{{- $settings := dict "mode" $mode "conf_dir" $values.cniConfDir "bin_dir" $values.cniBinDir "record_dir" (printf "%s/installer" $values.stateDir) "plugin_state_dir" (printf "%s/plugin" $values.stateDir) "agent_socket" (printf "%s/pod-events/grpc.sock" $values.runDir) "plugin_log_level" $values.logging.level "exclude_namespaces" $values.excludeNamespaces "health_address" (include "inpod.healthAddress" (list . "installer")) }}
{{- if eq $mode "owned" }}{{ $_ := set $settings "owned_file" $values.istioOwnedCNIConfigFileName }}{{ end }}
{{- if eq $mode "standalone" }}{{ $_ := set $settings "standalone_file" $values.cniConfFileName }}
{{- else if $values.cniConfFileName }}{{ $_ := set $settings "primary_file" $values.cniConfFileName }}{{ end }}
- name: installer
  {{- include "inpod.image" (list . "installer" $values.installer.image) | nindent 2 }}
  env:
  {{- include "inpod.env" (list . $settings $values.installer.settings) | trim | nindent 2 }}
  {{- include "inpod.probes" (list . "installer") | trim | nindent 2 }}
  {{- include "inpod.resources" (list . $values.installer.resources) | trim | nindent 2 }}
  {{- include "inpod.rights" (list . (ternary (list "DAC_OVERRIDE") list $values.installer.dacOverride) false) | nindent 2 }}
  terminationMessagePolicy: {{ $values.terminationMessagePolicy }}
  volumeMounts:
  - {name: installer, mountPath: {{ $values.runDir }}/installer}
  - {name: state, mountPath: /host{{ $values.stateDir }}}
  - {name: cni-conf, mountPath: /host{{ $values.cniConfDir }}}
  - {name: cni-bin, mountPath: /host{{ $values.cniBinDir }}}
  {{- if ne $values.runtimeConfigDir "none" }}
  - {name: runtime-config, mountPath: /host{{ $values.runtimeConfigDir }}, readOnly: true}
  {{- end }}
  - {name: leave, mountPath: /etc/inpod/leave, readOnly: true}
  {{- include "inpod.inPod" . | trim | nindent 2 }}
{{- end }}

{{/* Volumes of the pod with pod-events, netconfig and installer. */}}
{{- define "inpod.volumes" -}}
{{- $values := .Values }}
{{- range $name := list "pod-events" "netconfig" "installer" "ztunnel-broker" }}
{{ include "inpod.hostPath" (list $name (printf "%s/%s" $values.runDir $name) "DirectoryOrCreate") }}
{{- end }}
{{- if $values.repair.enabled }}
{{ include "inpod.hostPath" (list "repair" (printf "%s/repair" $values.runDir) "DirectoryOrCreate") }}
{{- end }}
{{ include "inpod.hostPath" (list "netns-socket" (printf "%s/netns" $values.runDir) "DirectoryOrCreate") }}
{{ include "inpod.hostPath" (list "netns" $values.cniNetnsDir "DirectoryOrCreate") }}
{{ include "inpod.hostPath" (list "state" $values.stateDir "DirectoryOrCreate") }}
{{ include "inpod.hostPath" (list "plugin-state" (printf "%s/plugin" $values.stateDir) "DirectoryOrCreate") }}
{{ include "inpod.hostPath" (list "cni-conf" $values.cniConfDir "DirectoryOrCreate") }}
{{ include "inpod.hostPath" (list "cni-bin" $values.cniBinDir "DirectoryOrCreate") }}
{{- if ne $values.runtimeConfigDir "none" }}
{{- /* No type of hostPath admits a missing directory: without a type, the runtime creates it instead of the kubelet. */}}
{{ include "inpod.hostPath" (list "runtime-config" $values.runtimeConfigDir "DirectoryOrCreate") }}
{{- end }}
{{- if eq $values.topology "combined" }}
{{ include "inpod.hostPath" (list "ztunnel" $values.ztunnelDir "DirectoryOrCreate") }}
{{- end }}
- name: leave
  configMap: {name: inpod-leave, optional: true}
{{ include "inpod.tokenVolume" . }}
{{ include "inpod.inPodVolume" . }}
{{- end }}

{{- define "inpod.tokenVolume" -}}
- name: token
  projected:
    sources:
    - serviceAccountToken: {path: token, expirationSeconds: 3600}
    - configMap:
        name: kube-root-ca.crt
        items: [{key: ca.crt, path: ca.crt}]
    - downwardAPI:
        items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]
{{- end }}

{{/* Settings of repair; its rights follow from them. */}}
{{- define "inpod.repairSettings" -}}
{{- with .Values.repair }}
{{- $chart := dict "repair_pods" .repairPods "label_pods" .labelPods "delete_pods" .deletePods "unknown_after_seconds" .unknownAfterSeconds "init_container_name" .initContainerName "broken_pod_label_key" .brokenPodLabelKey "broken_pod_label_value" (toString .brokenPodLabelValue) }}
{{- mergeOverwrite $chart (deepCopy (default dict .settings)) | toJson }}
{{- end }}
{{- end }}

{{- define "inpod.repair" -}}
{{- $values := .Values }}
- name: repair
  {{- include "inpod.image" (list . "repair" $values.repair.image) | nindent 2 }}
  env:
  - name: INPOD_NODE_NAME
    valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
  {{- include "inpod.env" (list . (dict "peer" "uid" "health_address" (include "inpod.healthAddress" (list . "repair"))) (include "inpod.repairSettings" . | fromJson)) | trim | nindent 2 }}
  {{- include "inpod.probes" (list . "repair") | trim | nindent 2 }}
  {{- include "inpod.resources" (list . $values.repair.resources) | trim | nindent 2 }}
  {{- include "inpod.rights" (list . list false) | nindent 2 }}
  terminationMessagePolicy: {{ $values.terminationMessagePolicy }}
  volumeMounts:
  - {name: repair, mountPath: {{ $values.runDir }}/repair}
  - {name: pod-events, mountPath: {{ $values.runDir }}/pod-events, readOnly: true}
  - {name: token, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
{{- end }}

{{- define "inpod.inPodVolume" -}}
- name: in-pod
  downwardAPI:
    items: [{path: name, fieldRef: {fieldPath: metadata.name}}]
{{- end }}
