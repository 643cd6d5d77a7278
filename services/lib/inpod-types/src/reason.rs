use std::fmt;

/// Declares the closed list of reasons: number on the wire, name, and the one line that helps.
macro_rules! reasons {
    ($($(#[$doc:meta])* $variant:ident = $number:literal, $name:literal, $remedy:literal;)*) => {
        /// Why a pod is in the mesh or not, or why a call failed. A closed list: the same words in gRPC details,
        /// events, metrics and CNI errors.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Reason {
            $($(#[$doc])* $variant,)*
        }

        impl Reason {
            /// Every reason, in the order of the contract.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// The number in `inpod.types.v1.Reason`.
            pub fn number(self) -> i32 {
                match self { $(Self::$variant => $number),* }
            }

            /// The reason of that number in `inpod.types.v1.Reason`.
            pub fn from_number(number: i32) -> Option<Self> {
                match number { $($number => Some(Self::$variant),)* _ => None }
            }

            /// The name in `inpod.types.v1.Reason`, without its prefix.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }

            /// What to do about it, in one line.
            pub fn remedy(self) -> &'static str {
                match self { $(Self::$variant => $remedy),* }
            }
        }
    };
}

reasons! {
    /// The pod's own label enrolls it.
    LabelOnPod = 1, "LABEL_ON_POD", "Nothing to do: the pod asked to join.";
    /// The namespace's label enrolls the pod.
    LabelOnNamespace = 2, "LABEL_ON_NAMESPACE", "Nothing to do: the pod's namespace asked to join.";
    /// Neither the pod nor its namespace asks to join.
    NotSelected = 3, "NOT_SELECTED", "Label the pod or its namespace as the setting enablement_selectors asks: istio.io/dataplane-mode=ambient, where it was not changed.";
    /// The pod's label keeps it out.
    OptedOut = 4, "OPTED_OUT", "Remove istio.io/dataplane-mode=none from the pod to let its namespace decide.";
    /// The pod shares the node's network.
    HostNetwork = 5, "HOST_NETWORK", "Pods with hostNetwork cannot be enrolled: they have no netns of their own.";
    /// The pod has a proxy of its own, to which inpod redirects nothing.
    HasSidecar = 6, "HAS_SIDECAR", "Disable sidecar injection for the pod and recreate it to enroll it.";
    /// The pod's containers have ended for good.
    PodTerminal = 7, "POD_TERMINAL", "Nothing to do: a pod that has succeeded or failed carries no traffic.";
    /// The namespace is excluded in the node's configuration.
    NamespaceExcluded = 8, "NAMESPACE_EXCLUDED", "Remove the namespace from excludeNamespaces to let its pods join.";
    /// inpod is being taken off the node.
    NodeLeaves = 9, "NODE_LEAVES", "Nothing to do where inpod is to go from this node; else take back the word in leave_file (the ConfigMap inpod-leave).";
    /// A sidecar was injected: the pod's traffic goes to it.
    SidecarInjected = 10, "SIDECAR_INJECTED", "Nothing to do: the pod's proxy was injected for it.";

    /// A field of the request, a manifest or the configuration cannot be used.
    InvalidField = 20, "INVALID_FIELD", "Correct the named field.";
    /// The caller may not call this.
    CallerRefused = 21, "CALLER_REFUSED", "Call from a host process or the service that the RPC names; see the setting peer.";
    /// The source of pods does not know the pod.
    PodUnknown = 22, "POD_UNKNOWN", "Wait for the pod to appear, or check that it was not deleted meanwhile.";
    /// A pod of that name exists, with another UID.
    PodUidMismatch = 23, "POD_UID_MISMATCH", "Nothing to do: the sandbox belongs to an earlier pod of this name.";
    /// The pod is bound to another node.
    PodOtherNode = 24, "POD_OTHER_NODE", "Check that the setting node_name is this node's name in Kubernetes.";
    /// The source of pods does not know the pod's namespace.
    NamespaceUnknown = 25, "NAMESPACE_UNKNOWN", "Wait for the namespace to appear, or add its manifest.";
    /// The agent is not ready to decide yet.
    Starting = 26, "STARTING", "Wait: the agent is reading its state.";
    /// More calls at once than the process admits.
    Overloaded = 27, "OVERLOADED", "Wait: the runtime repeats the call.";
    /// The caller's time ran out.
    DeadlineExceeded = 28, "DEADLINE_EXCEEDED", "Wait: the runtime repeats the call. See ExplainPod for the slow step.";
    /// Another service of the agent did not answer.
    DependencyUnavailable = 29, "DEPENDENCY_UNAVAILABLE", "Check that the named service runs and that its socket is mounted.";
    /// The sandbox named is not the pod's current one.
    SandboxNotCurrent = 30, "SANDBOX_NOT_CURRENT", "Nothing to do: a newer sandbox of the pod is in place.";
    /// The agent's state could not be written.
    CheckpointFailed = 31, "CHECKPOINT_FAILED", "Free space on, or repair, the file system under run_dir.";
    /// The agent could not be reached by the plugin.
    AgentUnavailable = 32, "AGENT_UNAVAILABLE", "Check that pod-events runs on this node.";
    /// A defect of inpod.
    Internal = 33, "INTERNAL", "Report it with the log of the service named.";
    /// A thing named in the call is not recorded.
    SandboxUnknown = 34, "SANDBOX_UNKNOWN", "Nothing to do for DEL; for CHECK recreate the pod.";

    /// Kubernetes does not answer, and it is not known whether the pod is to be in the mesh.
    SourceUnavailable = 35, "SOURCE_UNAVAILABLE", "Check that the API server answers this node and lets pod-events read pods and namespaces: GetStatus tells, condition pods.";

    /// The annotation `ambient.istio.io/redirection` could not be written.
    AnnotationFailed = 36, "ANNOTATION_FAILED", "Check that the API server answers this node and lets pod-events patch pods/status: GetStatus tells, condition annotations.";
    /// A Ready pod is in the mesh, and its annotation has not said so for ten seconds.
    AnnotationLate = 37, "ANNOTATION_LATE", "Check that the API server answers this node: its peers do not use HBONE with the pod until then.";
    /// No CNI call was seen for the pod, and its status shows no address to find it by.
    SandboxAwaited = 38, "SANDBOX_AWAITED", "Wait until the pod has started.";
    /// The pod's annotations ask for what takes traffic past ztunnel, and nobody permits that.
    NotPermitted = 39, "NOT_PERMITTED", "Permit it with the annotation inpod.io/allow on the namespace or the setting pods_may, or remove the annotation from the pod.";

    /// The path may not be used for a netns.
    NetnsPathRefused = 40, "NETNS_PATH_REFUSED", "Use a path below the setting netns_roots that is no symbolic link.";
    /// There is nothing at the path.
    NetnsMissing = 41, "NETNS_MISSING", "Nothing to do: the sandbox is gone and will be recreated.";
    /// What is at the path is no network namespace.
    NetnsNotANetns = 42, "NETNS_NOT_A_NETNS", "Check what the runtime passes as CNI_NETNS.";
    /// Another netns than the one that the caller means.
    NetnsMismatch = 43, "NETNS_MISMATCH", "Nothing to do: the path was reused; the sandbox will be recreated.";
    /// The path leads to the node's own netns.
    NetnsIsHost = 44, "NETNS_IS_HOST", "Check what the runtime passes as CNI_NETNS: it is the node's own netns.";
    /// The netns is claimed for another sandbox.
    NetnsInUse = 45, "NETNS_IN_USE", "Delete the other sandbox first, or check for two runtimes on one netns.";
    /// The netns holds none of the pod's addresses.
    AddressMismatch = 46, "ADDRESS_MISMATCH", "Check that the previous plugin of the chain configured this netns.";
    /// No claim is held for the sandbox.
    ClaimUnknown = 47, "CLAIM_UNKNOWN", "Claim the netns again: netconfig was restarted.";
    /// The kernel refused a change.
    KernelRefused = 48, "KERNEL_REFUSED", "Check that nf_tables, nat and conntrack are available in the kernel, and that AppArmor does not confine netconfig.";
    /// The rules in the netns are not the ones that were applied.
    RulesDiffer = 49, "RULES_DIFFER", "Nothing to do: the agent applies them again. Look for what changed them.";
    /// The path is not there, but processes run in the netns that was meant.
    NetnsUnreachable = 50, "NETNS_UNREACHABLE", "Check that the netns directories are mounted into netconfig with HostToContainer propagation.";

    /// No process of the pod is in a netns that holds one of its addresses.
    NetnsNotFound = 51, "NETNS_NOT_FOUND", "Wait until the pod has started, or recreate it so that CNI is called for it.";
    /// The programs of the backend that is configured cannot be used.
    BackendUnavailable = 52, "BACKEND_UNAVAILABLE", "Install iptables in netconfig's image, or set backend to nftables.";
    /// A program of the backend did not get its lock, or did not end, in time.
    BackendBusy = 53, "BACKEND_BUSY", "Wait: the call is repeated. Look for a process that holds the lock.";
    /// IPv6 is to be captured in a netns that has none.
    Ipv6Unavailable = 54, "IPV6_UNAVAILABLE", "Set ipv6_capture to auto, or switch IPv6 on in the pod.";

    /// Something else undoes the pod's rules again and again.
    RulesContested = 55, "RULES_CONTESTED", "Look for another agent that changes rules in the pod's netns; they are mended again by themselves, with growing waits.";
    /// ztunnel was told of the pod and no longer listens in its netns.
    ListenerLost = 56, "LISTENER_LOST", "Nothing to do: ztunnel is told of the pod again. Look at ztunnel's log for what it says of the pod.";

    /// The broker was not given the desired set yet.
    NotSeeded = 60, "NOT_SEEDED", "Wait: pod-events sends the desired set when it has read its state.";
    /// The broker was restarted meanwhile.
    InstanceMismatch = 61, "INSTANCE_MISMATCH", "Read the broker's state again and repeat with its instance_id.";
    /// A later word on the sandbox is already known.
    RevisionStale = 62, "REVISION_STALE", "Nothing to do: a newer change of the same sandbox is in place.";
    /// No ztunnel has connected since the broker started.
    ZtunnelNeverConnected = 63, "ZTUNNEL_NEVER_CONNECTED", "Check that ztunnel runs on this node and mounts the ZDS socket's directory.";
    /// Every ztunnel has gone.
    ZtunnelLost = 64, "ZTUNNEL_LOST", "Check why ztunnel stopped; it reconnects within 15 s once it runs.";
    /// A ztunnel is connected but has not been brought up to date.
    ZtunnelSnapshotUnfinished = 65, "ZTUNNEL_SNAPSHOT_UNFINISHED", "Wait: ztunnel is being told the node's pods.";
    /// ztunnel refused the pod.
    ZtunnelRefused = 66, "ZTUNNEL_REFUSED", "Read ztunnel's words in the message: most often a port (15001, 15006, 15008) is taken in the pod.";
    /// ztunnel did not answer.
    ZtunnelSilent = 67, "ZTUNNEL_SILENT", "Look at ztunnel's log: it did not acknowledge the pod in time.";
    /// The broker could not get the netns's descriptor.
    DescriptorUnavailable = 68, "DESCRIPTOR_UNAVAILABLE", "Check that netconfig runs and that its netns directory is mounted into the broker.";
    /// ztunnel's connection ended twice while it was told of the pod.
    ZtunnelQuarantined = 69, "ZTUNNEL_QUARANTINED", "Look at ztunnel's log for what it says of the pod; it is tried again by itself, with growing waits.";
    /// There is no such session.
    SessionUnknown = 70, "SESSION_UNKNOWN", "Read the sessions again: ztunnel has reconnected, or the broker was restarted.";
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_unique_and_lead_back() {
        for reason in Reason::ALL {
            assert_eq!(Reason::from_number(reason.number()), Some(*reason));
        }
        assert_eq!(Reason::from_number(0), None);
    }

    #[test]
    fn every_remedy_is_one_sentence_line() {
        for reason in Reason::ALL {
            let remedy = reason.remedy();
            assert!(remedy.ends_with('.') && !remedy.contains('\n'), "{reason}");
        }
    }
}
