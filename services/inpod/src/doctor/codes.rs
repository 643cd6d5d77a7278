//! The closed list of the problems known to doctor.

use std::fmt;

macro_rules! codes {
    ($($variant:ident = $name:literal, $severity:ident, $meaning:literal, $remedy:literal;)*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub(crate) enum Code {
            $($variant,)*
        }

        impl Code {
            /// All codes in the order of the documentation page.
            #[cfg(test)]
            pub(crate) const ALL: &[Self] = &[$(Self::$variant),*];

            pub(crate) fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }

            pub(crate) fn severity(self) -> Verdict {
                match self { $(Self::$variant => Verdict::$severity),* }
            }

            #[cfg(test)]
            pub(crate) fn meaning(self) -> &'static str {
                match self { $(Self::$variant => $meaning),* }
            }

            pub(crate) fn remedy(self) -> &'static str {
                match self { $(Self::$variant => $remedy),* }
            }
        }
    };
}

/// The result of a check; the worst verdict comes last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Verdict {
    Ok,
    Unknown,
    /// The node works at least in part, but an operator should know of the problem.
    Warning,
    /// Pods cannot start or are outside the mesh, or soon will be.
    Failed,
}

impl Verdict {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Unknown => "unknown",
            Self::Warning => "warning",
            Self::Failed => "failed",
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

codes! {
    KernelTooOld = "KERNEL_TOO_OLD", Failed, "The kernel is older than Linux 5.14, the first with SO_NETNS_COOKIE.", "Upgrade to Linux 5.14 or later; netconfig does not start on older kernels.";
    KernelFeatureMissing = "KERNEL_FEATURE_MISSING", Failed, "The kernel lacks a feature that every pod's rules need.", "Load the named module, or install the package with the kernel's extra modules, and load it at boot (modules-load.d).";
    KernelOptionMissing = "KERNEL_OPTION_MISSING", Warning, "The kernel lacks a feature that only the named setting or purpose needs.", "Load the module and restart netconfig if you need it; otherwise nothing to do.";
    NetnsNotShared = "NETNS_NOT_SHARED", Failed, "The mount that holds the runtime's network namespaces is not shared, so netconfig never sees those of new pods.", "Make the mount shared on the node (mount --make-shared, also at boot) and restart netconfig.";
    NetnsNotSeen = "NETNS_NOT_SEEN", Failed, "netconfig does not see all network namespaces that are mounted on the node.", "Mount the directory of network namespaces into netconfig with mountPropagation HostToContainer and restart netconfig.";
    LsmSelinuxConfined = "LSM_SELINUX_CONFINED", Failed, "SELinux is enforcing and netconfig runs in a domain that may not enter network namespaces.", "Run the agent as spc_t: set the SELinux type in the chart's values.";
    LsmApparmorConfined = "LSM_APPARMOR_CONFINED", Failed, "AppArmor confines netconfig with the runtime's default profile, which makes ADDs of ambient pods fail.", "Run netconfig unconfined: set AppArmor in the chart's values, or the annotation on older clusters.";
    RuntimeMissing = "RUNTIME_MISSING", Warning, "No container runtime's socket was found.", "If pods are to run on this node, start containerd or CRI-O; otherwise nothing to do.";
    CniDirectoryMissing = "CNI_DIRECTORY_MISSING", Failed, "A directory that the runtime reads network configurations or plugins from does not exist.", "Create it, or pass the runtime's directories: --cni-conf-dir and --cni-bin-dir here, and the installer's settings.";
    ChainMissing = "CHAIN_MISSING", Failed, "There is no valid network configuration.", "Install the cluster's primary network; the installer waits for it.";
    ChainFileInvalid = "CHAIN_FILE_INVALID", Failed, "A network configuration that sorts before the valid ones cannot be parsed; containerd then loads none.", "Correct or remove the file.";
    ChainWithoutInpod = "CHAIN_WITHOUT_INPOD", Failed, "The network that the runtime uses does not call inpod-cni, so pods start outside the mesh.", "Check that the installer runs, and its log: it adds the plugin to the chain.";
    ChainShadowed = "CHAIN_SHADOWED", Failed, "inpod-cni is in a network configuration that the runtime ignores, because another file sorts before it.", "Remove the earlier file, or give the installer's file a name that sorts before it.";
    ChainSecondAgent = "CHAIN_SECOND_AGENT", Failed, "Another mesh's plugin is in the same chain; both would redirect pods.", "Uninstall the other agent, or let the installer replace it (it replaces the entry of istio-cni in one step).";
    ChainTwice = "CHAIN_TWICE", Warning, "The chain calls inpod-cni more than once.", "Remove the entries that the installer did not write.";
    ChainExclusive = "CHAIN_EXCLUSIVE", Warning, "Cilium renames other network configurations.", "Set cni.exclusive=false in Cilium's values.";
    PluginMissing = "PLUGIN_MISSING", Failed, "The plugin's binary is not in the runtime's plugin directory.", "Check that the installer runs, and its log: it copies the plugin.";
    PluginNotExecutable = "PLUGIN_NOT_EXECUTABLE", Failed, "The plugin's binary is not executable.", "Remove it and restart the installer, which copies it again; check that the file system is not mounted noexec.";
    PluginSilent = "PLUGIN_SILENT", Failed, "The plugin's binary does not answer the CNI command VERSION.", "Remove it and restart the installer, which copies it again.";
    KillSwitch = "KILL_SWITCH", Failed, "The kill switch is on: the plugin does nothing, and every pod starts outside the mesh.", "Turn it off when it is no longer needed: run installer enable, or remove the file.";
    SocketMissing = "SOCKET_MISSING", Failed, "A service's socket does not exist: the service does not run, or uses another directory.", "Start the service, or pass its directory with --run-dir.";
    SocketOpen = "SOCKET_OPEN", Failed, "A service's directory or socket has the wrong type, or permissions for other users.", "Restart the service, which sets the modes 0700 and 0600, and find out what changed them.";
    ServiceSilent = "SERVICE_SILENT", Failed, "A service's socket exists, but the service does not answer.", "Check that the service runs, and its log.";
    ServiceNotReady = "SERVICE_NOT_READY", Failed, "A service reports that it is not ready.", "Check its conditions (inpod status) and its log.";
    ConditionBad = "CONDITION_BAD", Failed, "A service reports that one of its conditions is not met.", "Read the condition's message; the service's log has the details.";
    AddsRefused = "ADDS_REFUSED", Failed, "netconfig could not apply rules in temporary network namespaces, so ADDs of ambient pods would fail.", "Read the reason in netconfig's log, and check what confines it: AppArmor, SELinux, seccomp, or missing capabilities.";
    VersionsDiffer = "VERSIONS_DIFFER", Warning, "Services run two different releases, which are compatible.", "Finish the upgrade.";
    VersionsTooFar = "VERSIONS_TOO_FAR", Failed, "Services are more than one release apart.", "Upgrade the older ones; a release is compatible with the one before it.";
    InstallerAbsent = "INSTALLER_ABSENT", Warning, "The installer does not run on this node, so nothing restores the plugin if it is removed from the chain.", "Start the installer, unless you manage the chain yourself.";
    ZdsSocketMissing = "ZDS_SOCKET_MISSING", Failed, "The socket that ztunnel connects to does not exist.", "Check that ztunnel-broker runs, and its log; pass the path with --zds-socket if it is another one.";
    ZdsSocketForeign = "ZDS_SOCKET_FOREIGN", Failed, "Another process than ztunnel-broker listens on ztunnel's socket.", "Stop the other node agent (istio-cni) and restart ztunnel-broker.";
    ZtunnelAbsent = "ZTUNNEL_ABSENT", Failed, "No ztunnel is connected, so ambient pods cannot start.", "Check that ztunnel runs on this node, and that its volume is the directory of the socket.";
    ZtunnelBehind = "ZTUNNEL_BEHIND", Warning, "A ztunnel is connected but has not received all pods yet.", "Wait; if it stays so, check ztunnel's log.";
    BrokerNotSeeded = "BROKER_NOT_SEEDED", Warning, "pod-events has not sent ztunnel-broker the node's pods yet.", "Wait; if it stays so, check the log of pod-events.";
    WorkloadsRefused = "WORKLOADS_REFUSED", Warning, "A ztunnel refused pods, or pods are quarantined.", "Run inpod explain for each pod; it shows ztunnel's error.";
    PodsUnhealthy = "PODS_AMISS", Warning, "Pods have a failure that is not resolved.", "Run inpod pods --unhealthy to list them, and inpod explain for the cause.";
    PodsAdmittedUnenrolled = "PODS_LET_THROUGH", Warning, "Pods were admitted unenrolled: they started before inpod could tell whether they belong to the mesh.", "Run inpod pods --admitted-unenrolled to list them; they are enrolled as soon as the source of pods answers.";
    RulesDrifted = "RULES_DRIFTED", Warning, "The rules in some pods differ from those that inpod wrote.", "inpod repairs them; if it stays so, another program changes them again: inpod explain shows the differences.";
    PodFindings = "POD_FINDINGS", Warning, "Something in pods' network namespaces blocks redirection, or could.", "Look up each finding's kind in netconfig_service.proto.";
    Ipv6Disabled = "IPV6_DISABLED", Warning, "IPv6 is disabled on the node or for new network namespaces.", "On an IPv4-only cluster set ipv6_capture to off; otherwise enable IPv6.";
    RpFilterStrict = "RP_FILTER_STRICT", Warning, "Reverse path filtering is strict for all interfaces and inherited by new network namespaces; it drops packets whose return path differs.", "Set net.ipv4.conf.all.rp_filter and net.ipv4.conf.default.rp_filter to 2 or 0.";
    ConntrackNearFull = "CONNTRACK_NEAR_FULL", Warning, "The node's connection tracking table is more than 80 percent full; when it is full, new connections are dropped.", "Raise net.netfilter.nf_conntrack_max.";
    InotifyLow = "INOTIFY_LOW", Warning, "The limits of inotify instances or watches per user are low.", "Raise fs.inotify.max_user_instances to at least 128 and fs.inotify.max_user_watches to at least 8192.";
    FilesNearLimit = "FILES_NEAR_LIMIT", Warning, "A service, or the node, has opened more than 80 percent of the files that its limit allows.", "Raise the limit (LimitNOFILE of the runtime, fs.file-max): the broker and netconfig hold a file for each pod.";
    StateReadOnly = "STATE_READ_ONLY", Failed, "A state directory is on a file system that is mounted read-only.", "Mount it writable, or move the directory.";
    StateSpaceLow = "STATE_SPACE_LOW", Failed, "A file system that holds state has less than 16 MiB or fewer than 100 files left.", "Free space there.";
    StateOpen = "STATE_OPEN", Failed, "A state directory has permissions for other users.", "Set its mode to 0700 and find out what changed it.";
    SpoolWaiting = "SPOOL_WAITING", Warning, "Calls of the plugin wait in the spool for pod-events.", "Check the log of pod-events, which reads them when it runs.";
    SpoolFull = "SPOOL_FULL", Failed, "The spool is full; further calls of the plugin are not recorded.", "Start pod-events, which reads them. Its log names entries that it skips; those may be removed.";
    SelfTestFailed = "SELF_TEST_FAILED", Failed, "The rules of a pod could not be written in a temporary network namespace.", "Read the message: it names the call that the kernel refused, or the missing option of the kernel.";
}
