//! What can be wrong with a node, by name: a closed list.

use std::fmt;

/// Declares the codes: how bad it is, what it means, and what helps.
macro_rules! codes {
    ($($variant:ident = $name:literal, $severity:ident, $meaning:literal, $remedy:literal;)*) => {
        /// Something that can be wrong with a node.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub(crate) enum Code {
            $($variant,)*
        }

        impl Code {
            /// Every code, in the order of the page.
            #[cfg(test)]
            pub(crate) const ALL: &[Self] = &[$(Self::$variant),*];

            /// The name, for programs and for searching.
            pub(crate) fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }

            /// How bad it is where it is so.
            pub(crate) fn severity(self) -> Verdict {
                match self { $(Self::$variant => Verdict::$severity),* }
            }

            /// What it means, for the page.
            #[cfg(test)]
            pub(crate) fn meaning(self) -> &'static str {
                match self { $(Self::$variant => $meaning),* }
            }

            /// What to do about it.
            pub(crate) fn remedy(self) -> &'static str {
                match self { $(Self::$variant => $remedy),* }
            }
        }
    };
}

/// What a check came to, the worst last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Verdict {
    /// As it should be.
    Ok,
    /// It could not be looked at.
    Unknown,
    /// It works, or some of it; somebody should know.
    Warning,
    /// Pods are kept from starting, or go outside the mesh, or will.
    Failed,
}

impl Verdict {
    pub(crate) fn word(self) -> &'static str {
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
    KernelTooOld = "KERNEL_TOO_OLD", Failed, "The kernel is older than Linux 5.14, the first with SO_NETNS_COOKIE.", "Run a kernel of Linux 5.14 or later: netconfig does not start on an older one.";
    KernelFeatureMissing = "KERNEL_FEATURE_MISSING", Failed, "The kernel lacks a part that every pod's rules need.", "Load the module that is named, or install the package with the kernel's extra modules, and have it loaded at boot (modules-load.d).";
    KernelOptionMissing = "KERNEL_OPTION_MISSING", Warning, "The kernel lacks a part that some settings need.", "Nothing to do unless the setting that is named is used; then load the module.";
    NetnsNotShared = "NETNS_NOT_SHARED", Failed, "The mount below which the runtime mounts netns does not pass mounts on, so that netconfig never sees a new pod's.", "Make the mount shared on the node (mount --make-shared, at boot) and start netconfig again.";
    NetnsNotSeen = "NETNS_NOT_SEEN", Failed, "Netns that are mounted on the node are not mounted where netconfig looks.", "Mount the netns directory into netconfig with mountPropagation HostToContainer and start it again.";
    LsmSelinuxConfined = "LSM_SELINUX_CONFINED", Failed, "SELinux is enforcing and netconfig runs in a domain that may not enter netns.", "Run the agent as spc_t: set the SELinux type in the chart's values.";
    LsmApparmorConfined = "LSM_APPARMOR_CONFINED", Failed, "AppArmor confines netconfig by a runtime's default profile, under which pods of the mesh are refused.", "Run netconfig unconfined: the chart's AppArmor value, or its annotation on old clusters.";
    RuntimeMissing = "RUNTIME_MISSING", Warning, "No container runtime's socket is where one is known to be.", "Nothing to do unless pods are to start here; then start containerd or CRI-O.";
    CniDirectoryMissing = "CNI_DIRECTORY_MISSING", Failed, "A directory that the runtime reads networks or plugins from is not there.", "Make it, or give the directories that the runtime is configured with: --cni-conf-dir, --cni-bin-dir, and the installer's settings.";
    ChainMissing = "CHAIN_MISSING", Failed, "There is no network configuration that a runtime could take.", "Install the cluster's primary network; the installer waits for it.";
    ChainFileInvalid = "CHAIN_FILE_INVALID", Failed, "A network configuration ahead of the valid ones cannot be read: containerd takes none then.", "Correct or remove the file.";
    ChainWithoutInpod = "CHAIN_WITHOUT_INPOD", Failed, "The network that the runtime takes does not call inpod-cni: pods start outside the mesh.", "Start the installer, or look at its log: it puts the plugin into the chain.";
    ChainShadowed = "CHAIN_SHADOWED", Failed, "inpod-cni is in a network that the runtime does not take, since another file comes first.", "Remove the earlier file, or give the installer's file a name that sorts before it.";
    ChainSecondAgent = "CHAIN_SECOND_AGENT", Failed, "Another mesh's plugin is in the same chain: both would redirect pods.", "Uninstall the other agent, or let the installer take its place (it replaces istio-cni's entry in one step).";
    ChainTwice = "CHAIN_TWICE", Warning, "The chain calls inpod-cni more than once.", "Remove the entries that the installer did not write.";
    ChainExclusive = "CHAIN_EXCLUSIVE", Warning, "Cilium renames the networks of others.", "Set cni.exclusive=false in Cilium's values.";
    PluginMissing = "PLUGIN_MISSING", Failed, "The plugin's binary is not in the directory that the runtime looks in.", "Start the installer, or look at its log: it copies the plugin.";
    PluginNotExecutable = "PLUGIN_NOT_EXECUTABLE", Failed, "The plugin's binary is there and may not be executed.", "Remove it and start the installer, which copies it anew; check that the file system is not mounted noexec.";
    PluginSilent = "PLUGIN_SILENT", Failed, "The plugin's binary does not answer VERSION as a plugin does.", "Remove it and start the installer, which copies it anew.";
    KillSwitch = "KILL_SWITCH", Failed, "The kill switch is set: every pod passes the plugin and starts outside the mesh.", "Take it back when it is no longer needed: installer enable, or remove the file.";
    SocketMissing = "SOCKET_MISSING", Failed, "A service's socket is not there: the service does not run, or its directory is not the one that is looked at.", "Start the service, or give --run-dir.";
    SocketOpen = "SOCKET_OPEN", Failed, "A service's directory or socket is open to others than its user, or of another type.", "Start the service again: it makes the directory 0700 and the socket 0600. Find out who changed it.";
    ServiceSilent = "SERVICE_SILENT", Failed, "A service's socket is there and nobody answers.", "Look whether the service runs, and at its log.";
    ServiceNotReady = "SERVICE_NOT_READY", Failed, "A service says that it is not ready.", "Look at its conditions (inpod status) and its log.";
    ConditionBad = "CONDITION_BAD", Failed, "A service says that something it depends on does not hold.", "Read what it says; the log of the service tells more.";
    BackendUnusable = "BACKEND_UNUSABLE", Failed, "netconfig found nothing that it can write rules with.", "Look at netconfig's log for what it tried; load nf_tables, or use the image with the iptables programs.";
    AddsRefused = "ADDS_REFUSED", Failed, "netconfig tried what each pod's ADD asks for, in netns made for it, and could not: pods of the mesh would be refused.", "Read the reason in netconfig's log, and look at what confines it: AppArmor, SELinux, seccomp, its capabilities.";
    BackendsMixed = "BACKENDS_MIXED", Warning, "Rules of pods are written with more than one backend.", "Nothing to do: a pod keeps its backend until it is restarted.";
    VersionsDiffer = "VERSIONS_DIFFER", Warning, "Services are of two releases that work together.", "Finish the upgrade.";
    VersionsTooFar = "VERSIONS_TOO_FAR", Failed, "Services are more than one release apart.", "Upgrade the older ones; a release works with the one before it.";
    InstallerAbsent = "INSTALLER_ABSENT", Warning, "The installer does not run here: nobody keeps the plugin in the chain.", "Nothing to do where the chain is kept otherwise; else start it.";
    ZdsSocketMissing = "ZDS_SOCKET_MISSING", Failed, "The socket on which ztunnels connect is not there.", "Start ztunnel-broker, or look at its log; --zds-socket says where it is looked for.";
    ZdsSocketForeign = "ZDS_SOCKET_FOREIGN", Failed, "Somebody else than ztunnel-broker listens on ztunnel's socket.", "Stop the other node agent (istio-cni) and start ztunnel-broker again.";
    ZtunnelAbsent = "ZTUNNEL_ABSENT", Failed, "No ztunnel is connected: pods of the mesh cannot start.", "Look at the node's ztunnel: whether it runs, and whether its volume is the directory of the socket.";
    ZtunnelBehind = "ZTUNNEL_BEHIND", Warning, "A ztunnel is connected and not up to date.", "Wait; if it stays so look at ztunnel's log.";
    BrokerNotSeeded = "BROKER_NOT_SEEDED", Warning, "pod-events has not told ztunnel-broker yet which pods there are.", "Wait; if it stays so look at the log of pod-events.";
    WorkloadsRefused = "WORKLOADS_REFUSED", Warning, "A ztunnel refuses pods, or pods are in quarantine.", "inpod explain says ztunnel's words for each pod.";
    PodsAmiss = "PODS_AMISS", Warning, "Pods have a failure that is not mended.", "inpod pods --amiss lists them, inpod explain says why.";
    PodsLetThrough = "PODS_LET_THROUGH", Warning, "Pods were let through without a decision: they may be outside the mesh.", "inpod pods --let-through lists them; they are enrolled as soon as the source of pods answers.";
    RulesDrifted = "RULES_DRIFTED", Warning, "Rules in pods are not what was written there.", "They are mended by themselves; if it stays so somebody changes them again: inpod explain shows the differences.";
    PodFindings = "POD_FINDINGS", Warning, "Something in pods' netns stands in the way of redirection, or could.", "What each finding means is told with its kind in netconfig_service.proto.";
    Ipv6Disabled = "IPV6_DISABLED", Warning, "IPv6 is switched off on the node or for new netns.", "Nothing to do on a cluster of IPv4 alone; set ipv6_capture to off there. Else enable IPv6.";
    RpFilterStrict = "RP_FILTER_STRICT", Warning, "Reverse path filtering is strict for all interfaces, and new netns inherit it: packets whose way back is another one are dropped.", "Set net.ipv4.conf.all.rp_filter and net.ipv4.conf.default.rp_filter to 2 or 0.";
    ConntrackNearFull = "CONNTRACK_NEAR_FULL", Warning, "The node's table of connections is more than 80 percent full; new ones are dropped when it is.", "Raise net.netfilter.nf_conntrack_max.";
    InotifyLow = "INOTIFY_LOW", Warning, "Few inotify instances or watches are allowed for a user.", "Raise fs.inotify.max_user_instances to 128 or more and fs.inotify.max_user_watches to 8192 or more.";
    FilesNearLimit = "FILES_NEAR_LIMIT", Warning, "A service, or the node, has more than 80 percent of the files open that it may.", "Raise the limit (LimitNOFILE of the runtime, fs.file-max): the broker and netconfig hold a file for each pod.";
    StateReadOnly = "STATE_READ_ONLY", Failed, "A directory of state is on a file system that is mounted read-only.", "Mount it writable, or move the directory.";
    StateSpaceLow = "STATE_SPACE_LOW", Failed, "A file system of state has less than 16 MiB or less than 100 files left.", "Free space there.";
    StateOpen = "STATE_OPEN", Failed, "A directory of state is open to others than its user.", "Restrict it to 0700 and find out who changed it.";
    SpoolWaiting = "SPOOL_WAITING", Warning, "Calls of the plugin wait in the spool for pod-events.", "Look at the log of pod-events; they are read when it runs.";
    SpoolFull = "SPOOL_FULL", Failed, "The spool holds as many calls as it may: further ones are not written down.", "Start pod-events, which reads them. Entries that it skips are named in its log and may be removed.";
    SelfTestFailed = "SELF_TEST_FAILED", Failed, "Traffic that was sent through real rules in two netns made for it did not go as it should.", "Read which check failed: it names the rule, the port and the family.";
}
