{{/* The effective values: the user's, then the platform's file, then values.yaml. Every template includes this first; only
the first inclusion does anything. */}}
{{- define "inpod.prepare" -}}
{{- if not .Values.prepared }}
{{- $values := .Values }}
{{- if ne (toString $values.defaultsOf) .Chart.Version }}
{{- fail (printf "the defaults of another chart (defaultsOf=%v, not %s): helm upgrade --reuse-values kept them; use --reset-then-reuse-values, which keeps your values and takes new defaults (in a copy of values.yaml of your own, delete defaultsOf)" (default "0.1.0" $values.defaultsOf) .Chart.Version) }}
{{- end }}
{{- include "inpod.over" (list $values (default dict $values.cni)) }}
{{- include "inpod.refuse" $values }}
{{- include "inpod.istio" $values }}
{{- $platform := coalesce (default dict $values.global).platform $values.platform "" }}
{{- if $platform }}
{{- $file := .Files.Get (printf "profiles/%s.yaml" $platform) }}
{{- if not $file }}
{{- fail (printf "unknown platform %q: use gke, k3d, k3s, microk8s, minikube or openshift, or leave it empty if the CNI directories are the usual ones" $platform) }}
{{- end }}
{{- include "inpod.fill" (list $values (fromYaml $file)) }}
{{- end }}
{{- include "inpod.fill" (list $values (fromYaml (include "inpod.defaults" $values))) }}
{{- $_ := set $values "prepared" true }}
{{- end }}
{{- end }}

{{/* Defaults of values that a platform may set. */}}
{{- define "inpod.defaults" -}}
cniBinDir: /opt/cni/bin
cniConfDir: /etc/cni/net.d
runtimeConfigDir: /etc/containerd
cniNetnsDir: /var/run/netns
chained: true
ztunnelPods: istio-system/app=ztunnel
terminationMessagePolicy: FallbackToLogsOnError
resourceQuotas: {enabled: false}
openshift: {privileged: false}
metrics: {address: "127.0.0.1:15014"}
istioOwnedCNIConfigFileName: 02-inpod.conflist
cniConfFileName: {{ if eq .chained false }}inpod.conflist{{ else }}""{{ end }}
{{- end }}

{{/* Adds the second map's values to the first where it has none. */}}
{{- define "inpod.fill" -}}
{{- $into := index . 0 }}
{{- range $key, $value := index . 1 }}
{{- $there := get $into $key }}
{{- if and (kindIs "map" $value) (kindIs "map" $there) }}
{{- include "inpod.fill" (list $there $value) }}
{{- else if or (not (hasKey $into $key)) (kindIs "invalid" $there) (and (kindIs "string" $there) (eq $there "")) }}
{{- $_ := set $into $key $value }}
{{- end }}
{{- end }}
{{- end }}

{{/* Overrides the first map's values with the second's. */}}
{{- define "inpod.over" -}}
{{- $into := index . 0 }}
{{- range $key, $value := index . 1 }}
{{- $there := get $into $key }}
{{- if and (kindIs "map" $value) (kindIs "map" $there) }}
{{- include "inpod.over" (list $there $value) }}
{{- else }}
{{- $_ := set $into $key $value }}
{{- end }}
{{- end }}
{{- end }}

{{/* Translates Istio's names of values. */}}
{{- define "inpod.istio" -}}
{{- $global := default dict .global }}
{{- $hub := coalesce $global.hub .hub }}{{ $_ := set . "hub" $hub }}
{{- $tag := coalesce .tag $global.tag | default "" }}{{ $_ := set . "tag" (toString $tag) }}
{{- $pull := coalesce .pullPolicy $global.imagePullPolicy | default "" }}{{ $_ := set . "pullPolicy" $pull }}
{{- $secrets := default .imagePullSecrets $global.imagePullSecrets }}{{ $_ := set . "imagePullSecrets" $secrets }}
{{- $level := dig "logging" "level" "" $global }}
{{- if $level }}{{ $_ := set .logging "level" $level }}{{ end }}
{{- if hasKey $global "logAsJson" }}{{ $_ := set . "logAsJson" $global.logAsJson }}{{ end }}
{{- end }}

{{/* Refuses values of istio-cni that inpod cannot honor. */}}
{{- define "inpod.refuse" -}}
{{- $global := default dict .global }}
{{- $no := dict }}
{{- if eq (toString .ambient.enabled) "false" }}{{ $_ := set $no "ambient.enabled=false" "inpod needs ambient mode; keep istio-cni for clusters with sidecars only" }}{{ end }}
{{- if eq (toString .ambient.reconcileIptablesOnStartup) "false" }}{{ $_ := set $no "ambient.reconcileIptablesOnStartup=false" "inpod always verifies and repairs the rules of running pods" }}{{ end }}
{{- if eq (toString .ambient.enableAmbientDetectionRetry) "false" }}{{ $_ := set $no "ambient.enableAmbientDetectionRetry=false" "inpod always makes a pod of unknown state wait, or records it; see the annotation inpod.io/on-unknown" }}{{ end }}
{{- if eq (toString .ambient.shareHostNetworkNamespace) "false" }}{{ $_ := set $no "ambient.shareHostNetworkNamespace=false" "inpod's pods always share the node's network, so that no runtime calls CNI for them; remove this value" }}{{ end }}
{{- if .ambient.configDir }}{{ $_ := set $no "ambient.configDir" "istio-cni does not read it either; remove this value" }}{{ end }}
{{- range $name := list "hub" "tag" }}
{{- if hasKey $.repair $name }}{{ $_ := set $no (printf "repair.%s" $name) "istio-cni does not read it either; set repair.image to a full image reference" }}{{ end }}
{{- end }}
{{- range $key, $value := default dict .env }}{{ $_ := set $no (printf "env.%s" $key) "inpod does not use istio-cni's variables; use podEvents.settings and netconfig.settings (HOST_PROBE_SNAT_IP is netconfig.settings.probe_source_v4)" }}{{ end }}
{{- if .variant }}{{ $_ := set $no "variant" "inpod's images have no variants: each is one static binary" }}{{ end }}
{{- if .image }}{{ $_ := set $no "image" "inpod has one image per container: set podEvents.image, netconfig.image, ztunnelBroker.image, installer.image or repair.image" }}{{ end }}
{{- if .revision }}{{ $_ := set $no "revision" "a node has one agent; remove this value" }}{{ end }}
{{- if .ownerName }}{{ $_ := set $no "ownerName" "it is a label for Istio's operator; use podLabels and daemonSetLabels" }}{{ end }}
{{- if eq (toString .provider) "multus" }}{{ $_ := set $no "provider=multus" "its NetworkAttachmentDefinition is for injected sidecars; remove this value: inpod joins the network to which Multus delegates" }}{{ end }}
{{- if dig "networkPolicy" "enabled" false $global }}{{ $_ := set $no "global.networkPolicy.enabled" "a NetworkPolicy does not apply to pods that share the node's network" }}{{ end }}
{{- if ne (default "all" $global.resourceScope) "all" }}{{ $_ := set $no "global.resourceScope" "the chart installs all its objects together" }}{{ end }}
{{- range $service := list "podEvents" "netconfig" "ztunnelBroker" "installer" "repair" "injector" }}
{{- range $name := list "run_dir" "peer" "health_address" "node_name" "pods_from" "kubeconfig" "plugin_state_dir" "zds_socket" "leave_file" "receipt_file" "host_root" "conf_dir" "bin_dir" "record_dir" "agent_socket" }}
{{- if or (hasKey $.settings $name) (hasKey (default dict (get $ $service).settings) $name) }}{{ $_ := set $no (printf "settings.%s" $name) "the chart sets it to match mounts and probes; see runDir, stateDir, ztunnelDir, cniConfDir, cniBinDir, topology, splitPeer and healthPort" }}{{ end }}
{{- end }}
{{- if or (hasKey $.settings "otlp_endpoint") (hasKey (default dict (get $ $service).settings) "otlp_endpoint") }}{{ $_ := set $no "settings.otlp_endpoint" "services export no spans any more; the trace_id of the logs names one call in all services, and inpod_pod_events_add_phase_duration_seconds has the phases of an ADD; remove this value" }}{{ end }}
{{- end }}
{{- range $name, $value := dict "repair_pods" "repairPods" "label_pods" "labelPods" "delete_pods" "deletePods" "unknown_after_seconds" "unknownAfterSeconds" "init_container_name" "initContainerName" "broken_pod_label_key" "brokenPodLabelKey" "broken_pod_label_value" "brokenPodLabelValue" }}
{{- if hasKey (default dict $.repair.settings) $name }}{{ $_ := set $no (printf "repair.settings.%s" $name) (printf "the chart derives the rights from a value; set repair.%s" $value) }}{{ end }}
{{- end }}
{{- if hasKey (default dict .podEvents.settings) "startup_taints" }}{{ $_ := set $no "podEvents.settings.startup_taints" "the chart derives the rights from a value; set startupTaints" }}{{ end }}
{{- $rules := default dict .netconfig.settings }}
{{- if not (has (toString (default "auto" $rules.backend)) (list "auto" "nftables")) }}{{ $_ := set $no "netconfig.settings.backend" "netconfig writes nf_tables only, for which the kernel needs CONFIG_NF_TABLES_INET, CONFIG_NFT_NAT and CONFIG_NFT_REDIR; remove this value" }}{{ end }}
{{- if not (regexMatch "^(socket|off|uid:[0-9]{1,10})$" (toString (default "socket" $rules.probe_match))) }}{{ $_ := set $no "netconfig.settings.probe_match" "must be socket, uid:NUMBER or off; instead of kubelet and cgroup:PATH, which were removed, set uid:0, the user of most kubelets" }}{{ end }}
{{- if hasKey (default dict .podEvents.settings) "inbound_capture" }}{{ $_ := set $no "podEvents.settings.inbound_capture" "no ztunnel since Istio 1.25 uses TPROXY, which was removed; remove this value" }}{{ end }}
{{- if hasKey (default dict .podEvents.settings) "istio_metrics" }}{{ $_ := set $no "podEvents.settings.istio_metrics" "metrics have inpod's names only (inpod_pod_events_add_duration_seconds counts ADDs); remove this value" }}{{ end }}
{{- if hasKey (default dict .ztunnelBroker.settings) "ztunnel_capabilities" }}{{ $_ := set $no "ztunnelBroker.settings.ztunnel_capabilities" "a ztunnel is known by its pod alone, whatever its capabilities; remove this value" }}{{ end }}
{{- range $name := list "reload_seconds" "max_connections" "linger_seconds" }}
{{- if hasKey (default dict $.injector.settings) $name }}{{ $_ := set $no (printf "injector.settings.%s" $name) "the injector always uses the former default; remove this value" }}{{ end }}
{{- end }}
{{- if and (eq (coalesce $global.hub .hub) "localhost") (ne (coalesce .pullPolicy $global.imagePullPolicy) "Never") }}{{ $_ := set $no "hub=localhost" "no registry has images there; set hub to the registry of your images, or pullPolicy=Never for images that are on every node" }}{{ end }}
{{- if not (has .topology (list "combined" "split")) }}{{ $_ := set $no "topology" "must be combined or split" }}{{ end }}
{{- if .metrics.podMonitor.enabled }}
{{- if or (not .metrics.address) (hasPrefix "127." .metrics.address) (hasPrefix "[::1]" .metrics.address) }}{{ $_ := set $no "metrics.podMonitor.enabled" "Prometheus cannot reach metrics.address, which is local to the node; set it to 0.0.0.0:15014 or [::]:15014" }}{{ end }}
{{- end }}
{{- if $no }}
{{- $lines := list }}
{{- range $key, $why := $no }}{{ $lines = append $lines (printf "%s: %s" $key $why) }}{{ end }}
{{- fail (printf "unsupported values:\n  %s" (join "\n  " $lines)) }}
{{- end }}
{{- end }}
