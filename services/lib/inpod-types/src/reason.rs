use std::fmt;

/// The closed list: number on the wire, name and remedy.
macro_rules! reasons {
    ($($(#[$doc:meta])* $variant:ident = $number:literal, $name:literal, $remedy:literal;)*) => {
        /// The reason for a pod's membership, or for a failed call. Names are the same in gRPC details, Events,
        /// metrics and CNI errors.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Reason {
            $($(#[$doc])* $variant,)*
        }

        impl Reason {
            /// All reasons, in the contract's order.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// Returns the number in `inpod.types.v1.Reason`.
            pub fn number(self) -> i32 {
                match self { $(Self::$variant => $number),* }
            }

            /// Converts a number of `inpod.types.v1.Reason`.
            pub fn from_number(number: i32) -> Option<Self> {
                match number { $($number => Some(Self::$variant),)* _ => None }
            }

            /// Returns the name in `inpod.types.v1.Reason`, without its prefix.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }

            /// Returns one line on what an operator can do.
            pub fn remedy(self) -> &'static str {
                match self { $(Self::$variant => $remedy),* }
            }
        }
    };
}

reasons! {
    /// A label on the pod enrolls it.
    LabelOnPod = 1, "LABEL_ON_POD", "Nothing to do: the pod asked to join.";
    /// A label on the namespace enrolls the pod.
    LabelOnNamespace = 2, "LABEL_ON_NAMESPACE", "Nothing to do: the pod's namespace asked to join.";
    /// Neither the pod nor its namespace asks to join.
    NotSelected = 3, "NOT_SELECTED", "Label the pod or its namespace istio.io/dataplane-mode=ambient, or as the setting enablement_selectors requires if it was changed.";
    /// A label on the pod keeps it out.
    OptedOut = 4, "OPTED_OUT", "Remove istio.io/dataplane-mode=none from the pod; its namespace then decides.";
    /// The pod uses the node's network.
    HostNetwork = 5, "HOST_NETWORK", "Pods with hostNetwork cannot be enrolled: they have no network namespace of their own.";
    /// inpod redirects nothing to the pod's sidecar.
    HasSidecar = 6, "HAS_SIDECAR", "To enroll the pod, disable sidecar injection for it and recreate it.";
    /// The pod has succeeded or failed.
    PodTerminal = 7, "POD_TERMINAL", "Nothing to do: a pod that has succeeded or failed carries no traffic.";
    /// The node's configuration excludes the namespace.
    NamespaceExcluded = 8, "NAMESPACE_EXCLUDED", "Remove the namespace from excludeNamespaces to let its pods join.";
    /// inpod is being uninstalled from the node, or handed over.
    NodeLeaves = 9, "NODE_LEAVES", "Nothing to do if inpod is to go from this node; otherwise empty the key mode in the ConfigMap inpod-leave (the setting leave_file).";
    /// A sidecar was injected, and traffic is redirected to it.
    SidecarInjected = 10, "SIDECAR_INJECTED", "Nothing to do: the pod's traffic goes through its injected sidecar.";

    /// A field of request, manifest or configuration is invalid.
    InvalidField = 20, "INVALID_FIELD", "Correct the named field.";
    /// The caller is not authorized for this call.
    CallerRefused = 21, "CALLER_REFUSED", "Call from a process on the host or from the service that the RPC names; see the setting peer.";
    /// The source of pods does not know the pod.
    PodUnknown = 22, "POD_UNKNOWN", "Wait for the pod to appear, or check that it was not deleted in the meantime.";
    /// A pod of that name exists, with another UID.
    PodUidMismatch = 23, "POD_UID_MISMATCH", "Nothing to do: the sandbox belongs to an earlier pod of this name.";
    /// The pod is bound to another node.
    PodOtherNode = 24, "POD_OTHER_NODE", "Check that the setting node_name is the name of this node in Kubernetes.";
    /// The source of pods does not know the pod's namespace.
    NamespaceUnknown = 25, "NAMESPACE_UNKNOWN", "Wait for the namespace to appear, or add its manifest.";
    /// The agent is starting and cannot decide yet.
    Starting = 26, "STARTING", "Wait: the agent is reading its state.";
    /// The process accepts no more calls.
    Overloaded = 27, "OVERLOADED", "Wait: the runtime retries the call.";
    /// The caller's deadline passed.
    DeadlineExceeded = 28, "DEADLINE_EXCEEDED", "Wait: the runtime retries the call. See ExplainPod for the slow step.";
    /// Another service of the agent did not answer.
    DependencyUnavailable = 29, "DEPENDENCY_UNAVAILABLE", "Check that the named service runs and that its socket is mounted.";
    /// The named sandbox is not the pod's current one.
    SandboxNotCurrent = 30, "SANDBOX_NOT_CURRENT", "Nothing to do: the pod has a newer sandbox.";
    /// The agent's state could not be written.
    CheckpointFailed = 31, "CHECKPOINT_FAILED", "Free space on the file system of run_dir, or repair it.";
    /// The plugin could not reach the agent.
    AgentUnavailable = 32, "AGENT_UNAVAILABLE", "Check that pod-events runs on this node.";
    /// A bug in inpod.
    Internal = 33, "INTERNAL", "Report it with the log of the named service.";
    /// The named sandbox is not recorded.
    SandboxUnknown = 34, "SANDBOX_UNKNOWN", "Nothing to do for DEL; for CHECK recreate the pod.";

    /// Kubernetes does not answer: the pod's membership is unknown.
    SourceUnavailable = 35, "SOURCE_UNAVAILABLE", "Check that the API server answers this node and that pod-events may read pods and namespaces; see the condition pods in GetStatus.";

    /// The annotation `ambient.istio.io/redirection` could not be written.
    AnnotationFailed = 36, "ANNOTATION_FAILED", "Check that the API server answers this node and that pod-events may patch pods/status; see the condition annotations in GetStatus.";
    /// A Ready pod is enrolled for ten seconds without its annotation.
    AnnotationLate = 37, "ANNOTATION_LATE", "Check that the API server answers this node; until then peers do not use HBONE with the pod.";
    /// No CNI call was seen, and no address can locate the sandbox.
    SandboxAwaited = 38, "SANDBOX_AWAITED", "Wait until the pod has started.";
    /// The pod asks for traffic past ztunnel without permission.
    NotPermitted = 39, "NOT_PERMITTED", "Permit it with the annotation inpod.io/allow on the namespace or the setting pods_may, or remove the annotation from the pod.";

    /// The path is not permitted for network namespaces.
    NetnsPathRefused = 40, "NETNS_PATH_REFUSED", "Use a path below the setting netns_roots that is not a symbolic link.";
    /// The network namespace's path does not exist.
    NetnsMissing = 41, "NETNS_MISSING", "Nothing to do: the sandbox is gone and will be recreated.";
    /// The path is not a network namespace.
    NetnsNotANetns = 42, "NETNS_NOT_A_NETNS", "Check what the runtime passes as CNI_NETNS.";
    /// The path leads to an unexpected network namespace.
    NetnsMismatch = 43, "NETNS_MISMATCH", "Nothing to do: the path was reused; the sandbox will be recreated.";
    /// The path leads to the node's network namespace.
    NetnsIsHost = 44, "NETNS_IS_HOST", "Check what the runtime passes as CNI_NETNS: it is the node's own network namespace.";
    /// Another sandbox has claimed the network namespace.
    NetnsInUse = 45, "NETNS_IN_USE", "Delete the other sandbox first, or check whether two runtimes share one network namespace.";
    /// The network namespace has none of the pod's addresses.
    AddressMismatch = 46, "ADDRESS_MISMATCH", "Check that the previous plugin in the chain configured this network namespace.";
    /// There is no claim for the sandbox.
    ClaimUnknown = 47, "CLAIM_UNKNOWN", "Claim the network namespace again: netconfig was restarted.";
    /// The kernel rejected a change.
    KernelRefused = 48, "KERNEL_REFUSED", "Check that the kernel has nf_tables, nat and conntrack, and that AppArmor does not confine netconfig.";
    /// The rules differ from the applied ones.
    RulesDiffer = 49, "RULES_DIFFER", "Nothing to do: the agent applies them again. Find out what changed them.";
    /// The path is gone, but processes run in the expected network namespace.
    NetnsUnreachable = 50, "NETNS_UNREACHABLE", "Check that the directories of network namespaces are mounted into netconfig with HostToContainer propagation.";

    /// None of the pod's processes is in a network namespace with its address.
    NetnsNotFound = 51, "NETNS_NOT_FOUND", "Wait until the pod has started, or recreate it so that the runtime calls CNI for it.";
    /// IPv6 is to be captured where there is none.
    Ipv6Unavailable = 54, "IPV6_UNAVAILABLE", "Set ipv6_capture to auto, or enable IPv6 in the pod.";

    /// Another program keeps changing the pod's rules.
    RulesContested = 55, "RULES_CONTESTED", "Find the agent that changes rules in the pod's network namespace; inpod keeps repairing them, at growing intervals.";
    /// ztunnel was sent the pod but no longer listens in its network namespace.
    ListenerLost = 56, "LISTENER_LOST", "Nothing to do: ztunnel is sent the pod again. Check ztunnel's log for errors about the pod.";
    /// A DEL or a GC ended a sandbox in which the pod runs on.
    DeleteRejected = 57, "DELETE_REJECTED", "Find out why the runtime or CNI GC named a sandbox that runs: a list of valid attachments that lacks it, or a DEL by hand.";

    /// The broker has not received the desired set yet.
    NotSeeded = 60, "NOT_SEEDED", "Wait: pod-events sends the desired set when it has read its state.";
    /// The broker was restarted in the meantime.
    InstanceMismatch = 61, "INSTANCE_MISMATCH", "Read the broker's state again and retry with its instance_id.";
    /// A later change of the sandbox is already known.
    RevisionStale = 62, "REVISION_STALE", "Nothing to do: a newer change of the same sandbox is in place.";
    /// No ztunnel has connected since the broker's start.
    ZtunnelNeverConnected = 63, "ZTUNNEL_NEVER_CONNECTED", "Check that ztunnel runs on this node and mounts the directory of the ZDS socket.";
    /// All ztunnels have disconnected.
    ZtunnelLost = 64, "ZTUNNEL_LOST", "Check why ztunnel stopped; it reconnects within 15 s of its start.";
    /// A connected ztunnel has not received all pods yet.
    ZtunnelSnapshotUnfinished = 65, "ZTUNNEL_SNAPSHOT_UNFINISHED", "Wait: ztunnel is receiving the node's pods.";
    /// ztunnel refused the pod.
    ZtunnelRefused = 66, "ZTUNNEL_REFUSED", "Read ztunnel's error in the message: most often a port (15001, 15006, 15008) is taken in the pod.";
    /// ztunnel did not acknowledge the pod in time.
    ZtunnelSilent = 67, "ZTUNNEL_SILENT", "Check ztunnel's log: it did not acknowledge the pod in time.";
    /// The broker got no file descriptor of the network namespace.
    DescriptorUnavailable = 68, "DESCRIPTOR_UNAVAILABLE", "Check that netconfig runs and that its directory of network namespaces is mounted into the broker.";
    /// ztunnel disconnected twice while being sent the pod.
    ZtunnelQuarantined = 69, "ZTUNNEL_QUARANTINED", "Check ztunnel's log for errors about the pod; inpod retries it, at growing intervals.";
    /// There is no such session.
    SessionUnknown = 70, "SESSION_UNKNOWN", "Read the sessions again: ztunnel has reconnected, or the broker was restarted.";
    /// Another agent redirected the pod with rules that inpod can neither see nor replace.
    LegacyRules = 71, "LEGACY_RULES", "Restart the pod; until then it stays in the mesh as the other agent left it.";
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
