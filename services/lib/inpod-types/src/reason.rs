use std::fmt;

// The numbers of `google.rpc.Code`: this crate does not depend on a gRPC library.
const INVALID_ARGUMENT: i32 = 3;
const DEADLINE_EXCEEDED: i32 = 4;
const NOT_FOUND: i32 = 5;
const PERMISSION_DENIED: i32 = 7;
const RESOURCE_EXHAUSTED: i32 = 8;
const FAILED_PRECONDITION: i32 = 9;
const ABORTED: i32 = 10;
const INTERNAL: i32 = 13;
const UNAVAILABLE: i32 = 14;

/// Declares the closed list of reasons, each with its number on the wire, gRPC code, name and remedy.
macro_rules! reasons {
    ($($(#[$doc:meta])* $variant:ident = $number:literal, $code:ident, $name:literal, $remedy:literal;)*) => {
        /// The reason for a pod's membership, or for a failed call. The names are the same in gRPC details, Events,
        /// metrics and CNI errors.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Reason {
            $($(#[$doc])* $variant,)*
        }

        impl Reason {
            /// All reasons, in the order of the contract.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// Returns the number of the reason in `inpod.types.v1.Reason`.
            pub fn number(self) -> i32 {
                match self { $(Self::$variant => $number),* }
            }

            /// Returns the number of the gRPC code (`google.rpc.Code`) of a failure for this reason.
            pub fn code(self) -> i32 {
                match self { $(Self::$variant => $code),* }
            }

            /// Returns the reason with a number of `inpod.types.v1.Reason`, or `None` for an unknown number.
            pub fn from_number(number: i32) -> Option<Self> {
                match number { $($number => Some(Self::$variant),)* _ => None }
            }

            /// Returns the name in `inpod.types.v1.Reason`, without the prefix of the enum.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }

            /// Returns one line about the steps by which an operator can correct the problem.
            pub fn remedy(self) -> &'static str {
                match self { $(Self::$variant => $remedy),* }
            }
        }
    };
}

reasons! {
    /// A label on the pod itself enrolls the pod.
    LabelOnPod = 1, FAILED_PRECONDITION, "LABEL_ON_POD", "Nothing to do: the pod asked to join.";
    /// A label on the namespace enrolls the pod.
    LabelOnNamespace = 2, FAILED_PRECONDITION, "LABEL_ON_NAMESPACE", "Nothing to do: the pod's namespace asked to join.";
    /// Neither the pod nor its namespace asks to join the mesh.
    NotSelected = 3, FAILED_PRECONDITION, "NOT_SELECTED", "Label the pod or its namespace istio.io/dataplane-mode=ambient, or as the setting enablement_selectors requires if it was changed.";
    /// A label on the pod keeps the pod out of the mesh.
    OptedOut = 4, FAILED_PRECONDITION, "OPTED_OUT", "Remove istio.io/dataplane-mode=none from the pod; its namespace then decides.";
    /// The pod uses the node's network and has no netns of its own.
    HostNetwork = 5, FAILED_PRECONDITION, "HOST_NETWORK", "Pods with hostNetwork cannot be enrolled: they have no network namespace of their own.";
    /// The pod has a sidecar, to which inpod redirects no traffic.
    HasSidecar = 6, FAILED_PRECONDITION, "HAS_SIDECAR", "To enroll the pod, disable sidecar injection for it and recreate it.";
    /// The pod has succeeded or failed, and so carries no traffic.
    PodTerminal = 7, FAILED_PRECONDITION, "POD_TERMINAL", "Nothing to do: a pod that has succeeded or failed carries no traffic.";
    /// The node's configuration excludes the namespace of the pod.
    NamespaceExcluded = 8, FAILED_PRECONDITION, "NAMESPACE_EXCLUDED", "Remove the namespace from excludeNamespaces to let its pods join.";
    /// inpod is being uninstalled from the node, or handed over to another agent.
    NodeLeaves = 9, FAILED_PRECONDITION, "NODE_LEAVES", "Nothing to do if inpod is to go from this node; otherwise empty the key mode in the ConfigMap inpod-leave (the setting leave_file).";
    /// A sidecar was injected into the pod, and traffic is redirected to the sidecar.
    SidecarInjected = 10, FAILED_PRECONDITION, "SIDECAR_INJECTED", "Nothing to do: the pod's traffic goes through its injected sidecar.";
    /// The pod runs in a sandboxed runtime, whose network stack is outside of the pod's network namespace.
    SandboxedRuntime = 11, FAILED_PRECONDITION, "SANDBOXED_RUNTIME", "Run the pod with another runtime class, or label it istio.io/dataplane-mode=none; if the class is no sandbox, remove it from the setting sandboxed_runtime_classes.";

    /// The label `inpod.io/require` of the pod or its namespace enrolls the pod.
    MeshRequired = 12, FAILED_PRECONDITION, "MESH_REQUIRED", "Nothing to do: the label inpod.io/require of the pod or its namespace demands the mesh.";

    /// A field of the request, manifest or configuration is invalid.
    InvalidField = 20, INVALID_ARGUMENT, "INVALID_FIELD", "Correct the named field.";
    /// The caller is not authorized for the class of this call.
    CallerRefused = 21, PERMISSION_DENIED, "CALLER_REFUSED", "Call from a process on the host or from the service that the RPC names; see the settings peer and host_cgroups.";
    /// The source of pods, such as the API server, does not know the pod.
    PodUnknown = 22, NOT_FOUND, "POD_UNKNOWN", "Correct the manifest if the message names one; otherwise wait for the pod to appear, or check that it was not deleted in the meantime.";
    /// A pod of the given name exists, but has another UID.
    PodUidMismatch = 23, PERMISSION_DENIED, "POD_UID_MISMATCH", "Nothing to do: the sandbox belongs to an earlier pod of this name.";
    /// The pod is bound to another node than the node of the agent.
    PodOtherNode = 24, PERMISSION_DENIED, "POD_OTHER_NODE", "Check that the setting node_name is the name of this node in Kubernetes.";
    /// The source of pods does not know the namespace of the pod.
    NamespaceUnknown = 25, NOT_FOUND, "NAMESPACE_UNKNOWN", "Wait for the namespace to appear, or add its manifest.";
    /// The agent is starting, and cannot decide about the pod yet.
    Starting = 26, UNAVAILABLE, "STARTING", "Wait: the agent is reading its state.";
    /// The process is busy, and accepts no more calls for now.
    Overloaded = 27, RESOURCE_EXHAUSTED, "OVERLOADED", "Wait: the runtime retries the call.";
    /// The deadline of the caller passed before the call was done.
    DeadlineExceeded = 28, DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "Wait: the runtime retries the call. See ExplainPod for the slow step.";
    /// Another service of the agent did not answer a call.
    DependencyUnavailable = 29, UNAVAILABLE, "DEPENDENCY_UNAVAILABLE", "Check that the named service runs and that its socket is mounted.";
    /// The named sandbox is not the current sandbox of the pod.
    SandboxNotCurrent = 30, FAILED_PRECONDITION, "SANDBOX_NOT_CURRENT", "Nothing to do: the pod has a newer sandbox.";
    /// The agent's state could not be written to the checkpoint.
    CheckpointFailed = 31, INTERNAL, "CHECKPOINT_FAILED", "Free space on the file system of run_dir, or repair it.";
    /// The plugin could not reach the agent, or lost the connection.
    AgentUnavailable = 32, UNAVAILABLE, "AGENT_UNAVAILABLE", "Check that pod-events runs on this node and listens on the named socket, the plugin's setting agentSocket.";
    /// A bug in inpod made the call fail.
    Internal = 33, INTERNAL, "INTERNAL", "Report it with the log of the named service.";
    /// There is no record of the named sandbox.
    SandboxUnknown = 34, NOT_FOUND, "SANDBOX_UNKNOWN", "Nothing to do for DEL; for CHECK recreate the pod.";

    /// Kubernetes does not answer, so that the membership of the pod is unknown.
    SourceUnavailable = 35, UNAVAILABLE, "SOURCE_UNAVAILABLE", "Check that the API server answers this node and that pod-events may read pods and namespaces; see the condition pods in GetStatus.";

    /// The annotation `ambient.istio.io/redirection` could not be written to the pod.
    AnnotationFailed = 36, UNAVAILABLE, "ANNOTATION_FAILED", "Check that the API server answers this node and that pod-events may patch pods/status; see the condition annotations in GetStatus.";
    /// A Ready pod has been enrolled for ten seconds and is still without its annotation.
    AnnotationLate = 37, UNAVAILABLE, "ANNOTATION_LATE", "Check that the API server answers this node; until then peers do not use HBONE with the pod.";
    /// No CNI call was seen, and no address is known by which to locate the sandbox.
    SandboxAwaited = 38, FAILED_PRECONDITION, "SANDBOX_AWAITED", "Wait until the pod has started.";
    /// The pod asks for traffic past ztunnel without having the permission.
    NotPermitted = 39, FAILED_PRECONDITION, "NOT_PERMITTED", "Permit it with the annotation inpod.io/allow on the namespace or the setting pods_may, or remove the annotation from the pod.";

    /// The path is not permitted for network namespaces: not plain, outside the roots, or a symbolic link.
    NetnsPathRefused = 40, INVALID_ARGUMENT, "NETNS_PATH_REFUSED", "Use a path below the setting netns_roots that is not a symbolic link.";
    /// The path of the network namespace does not exist.
    NetnsMissing = 41, NOT_FOUND, "NETNS_MISSING", "Nothing to do: the sandbox is gone and will be recreated.";
    /// The path leads to a file other than a network namespace.
    NetnsNotANetns = 42, INVALID_ARGUMENT, "NETNS_NOT_A_NETNS", "Check what the runtime passes as CNI_NETNS.";
    /// The path leads to another network namespace than the expected one.
    NetnsMismatch = 43, FAILED_PRECONDITION, "NETNS_MISMATCH", "Nothing to do: the path was reused; the sandbox will be recreated.";
    /// The path leads to the network namespace of the node itself.
    NetnsIsHost = 44, PERMISSION_DENIED, "NETNS_IS_HOST", "Check what the runtime passes as CNI_NETNS: it is the node's own network namespace.";
    /// Another sandbox has already claimed the network namespace.
    NetnsInUse = 45, FAILED_PRECONDITION, "NETNS_IN_USE", "Delete the other sandbox first, or check whether two runtimes share one network namespace.";
    /// No address of the pod is configured in the network namespace.
    AddressMismatch = 46, FAILED_PRECONDITION, "ADDRESS_MISMATCH", "Check that the previous plugin in the chain configured this network namespace.";
    /// netconfig has no claim for the named sandbox.
    ClaimUnknown = 47, FAILED_PRECONDITION, "CLAIM_UNKNOWN", "Claim the network namespace again: netconfig was restarted.";
    /// The kernel rejected a change of the rules.
    KernelRefused = 48, INTERNAL, "KERNEL_REFUSED", "Check that the kernel has nf_tables, nat and conntrack, and that AppArmor does not confine netconfig.";
    /// The rules in the kernel differ from the applied rules.
    RulesDiffer = 49, FAILED_PRECONDITION, "RULES_DIFFER", "Nothing to do: the agent applies them again. Find out what changed them.";
    /// The path is gone, but processes still run in the expected network namespace.
    NetnsUnreachable = 50, UNAVAILABLE, "NETNS_UNREACHABLE", "Check that the directories of network namespaces are mounted into netconfig with HostToContainer propagation.";

    /// No process of the pod runs in a network namespace with the pod's address.
    NetnsNotFound = 51, NOT_FOUND, "NETNS_NOT_FOUND", "Wait until the pod has started, or recreate it so that the runtime calls CNI for it.";
    /// IPv6 is to be captured in a pod without IPv6.
    Ipv6Unavailable = 54, FAILED_PRECONDITION, "IPV6_UNAVAILABLE", "Set ipv6_capture to auto, or enable IPv6 in the pod.";

    /// Another program keeps changing the rules of the pod.
    RulesContested = 55, FAILED_PRECONDITION, "RULES_CONTESTED", "Find the agent that changes rules in the pod's network namespace; inpod keeps repairing them, at growing intervals.";
    /// ztunnel received the pod, but no longer listens in the pod's network namespace.
    ListenerLost = 56, UNAVAILABLE, "LISTENER_LOST", "Check ztunnel's log for errors about the pod and, for port 15053, that ztunnel's DNS proxy is on (ISTIO_META_DNS_CAPTURE); ztunnel is sent the pod again.";
    /// A DEL or a GC ended a sandbox in which the pod is still running.
    DeleteRejected = 57, FAILED_PRECONDITION, "DELETE_REJECTED", "Find out why the runtime or CNI GC named a sandbox that runs: a list of valid attachments that lacks it, or a DEL by hand.";

    /// A process of the pod listens on a port of ztunnel, or ztunnel's sockets lack ztunnel's mark.
    ListenerTaken = 58, FAILED_PRECONDITION, "LISTENER_TAKEN", "Stop the named process, or let it listen on another port than 15001, 15006, 15008 and 15053.";
    /// Something in the pod stops connections that inpod redirects.
    TrafficBlocked = 59, FAILED_PRECONDITION, "TRAFFIC_BLOCKED", "Change what the message names: rules of the pod must accept connections to ztunnel's ports, and bridges stand in the annotation istio.io/reroute-virtual-interfaces.";

    /// The broker has not received the desired set of pods yet.
    NotSeeded = 60, FAILED_PRECONDITION, "NOT_SEEDED", "Wait: pod-events sends the desired set when it has read its state.";
    /// The broker was restarted after the caller had read its state.
    InstanceMismatch = 61, ABORTED, "INSTANCE_MISMATCH", "Read the broker's state again and retry with its instance_id.";
    /// The broker already knows a later change of the sandbox.
    RevisionStale = 62, ABORTED, "REVISION_STALE", "Nothing to do: a newer change of the same sandbox is in place.";
    /// No ztunnel has connected since the start of the broker.
    ZtunnelNeverConnected = 63, UNAVAILABLE, "ZTUNNEL_NEVER_CONNECTED", "Check that ztunnel runs on this node and mounts the directory of the ZDS socket.";
    /// All ztunnels that were connected have disconnected.
    ZtunnelLost = 64, UNAVAILABLE, "ZTUNNEL_LOST", "Check why ztunnel stopped; it reconnects within 15 s of its start.";
    /// A connected ztunnel has not received all pods of the node yet.
    ZtunnelSnapshotUnfinished = 65, UNAVAILABLE, "ZTUNNEL_SNAPSHOT_UNFINISHED", "Wait: ztunnel is receiving the node's pods.";
    /// ztunnel received the pod and answered with an error.
    ZtunnelRefused = 66, UNAVAILABLE, "ZTUNNEL_REFUSED", "Read ztunnel's error in the message: most often a port (15001, 15006, 15008, 15053) is taken in the pod, by the process that explain names as a finding.";
    /// ztunnel received the pod, but did not acknowledge the pod in time.
    ZtunnelSilent = 67, UNAVAILABLE, "ZTUNNEL_SILENT", "Check ztunnel's log: it did not acknowledge the pod in time.";
    /// The broker could not get a file descriptor of the network namespace.
    DescriptorUnavailable = 68, UNAVAILABLE, "DESCRIPTOR_UNAVAILABLE", "Check that netconfig runs and that its directory of network namespaces is mounted into the broker.";
    /// ztunnel disconnected twice while the broker was sending the pod.
    ZtunnelQuarantined = 69, UNAVAILABLE, "ZTUNNEL_QUARANTINED", "Check ztunnel's log for errors about the pod; inpod retries it, at growing intervals.";
    /// Another agent redirected the pod, with rules that inpod can neither see nor replace.
    LegacyRules = 71, FAILED_PRECONDITION, "LEGACY_RULES", "Restart the pod; until then it stays in the mesh as the other agent left it.";
    /// The network namespace holds more tables, chains or rules of other programs than netconfig reads.
    RulesUnreadable = 72, FAILED_PRECONDITION, "RULES_UNREADABLE", "Remove what fills the pod's network namespace: a process of the pod with the capability NET_ADMIN made more tables, chains or rules than netconfig reads.";
    /// A process or rule of the pod uses ztunnel's mark, so that connections bypass ztunnel.
    TrafficBypassed = 73, FAILED_PRECONDITION, "TRAFFIC_BYPASSED", "Take the capabilities NET_RAW and NET_ADMIN from the process that the message names, or make the rule that it names use a mark outside of 0xfff.";
    /// Foreign routes or ip rules of the pod leave no place for inpod's.
    RoutingTaken = 74, FAILED_PRECONDITION, "ROUTING_TAKEN", "Remove the foreign route or ip rule that the message names from the pod's network namespace, or give it another table or a priority above 0.";
    /// Another program changed what inpod keeps in the node's own network namespace, and inpod wrote it again.
    NodeRepaired = 75, FAILED_PRECONDITION, "NODE_REPAIRED", "Find the program that deletes foreign rules on the node, such as systemd-networkd without ManageForeignRoutingPolicyRules=no or a firewall's reload; rules of other programs, such as those for hostPort, may be lost as well.";
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
