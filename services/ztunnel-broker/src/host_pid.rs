//! Checks whether the broker sees its peers' PIDs.

use std::{fs, process};

use anyhow::{Context as _, bail};
use inpod_service::peer::Cgroup;

/// The name of the initial cgroup namespace (`CGROUP_NS_INIT_INO` in linux/nsfs.h).
const FIRST_CGROUP_NAMESPACE: &str = "cgroup:[4026531835]";

/// The broker's process and process 1 of the PID namespace, read from procfs.
#[derive(Debug)]
struct Processes {
    own_pid: u32,
    own: Cgroup,
    /// Cgroup paths are relative to the broker's container, so the container's own path is the root.
    is_contained: bool,
    first: Cgroup,
}

/// Checks that process 1 is the node's. If process 1 belongs to the broker's container or pod, the PID namespace does
/// not include other pods.
///
/// # Errors
///
/// If the broker is in a PID namespace of its own, where processes of other pods have no PID, or cannot read procfs.
pub fn check() -> anyhow::Result<()> {
    let read = |path| fs::read_to_string(path).with_context(|| format!("cannot read {path}"));
    // The link is absent if the kernel has no cgroup namespaces.
    let namespace = fs::read_link("/proc/self/ns/cgroup").ok();
    let processes = Processes {
        own_pid: process::id(),
        own: Cgroup::parse(&read("/proc/self/cgroup")?),
        is_contained: namespace.is_some_and(|it| it.as_os_str() != FIRST_CGROUP_NAMESPACE),
        first: Cgroup::parse(&read("/proc/1/cgroup")?),
    };
    if let Some(why) = why_own_namespace(&processes) {
        bail!(
            "cannot identify the peers of ZDS: this process is in a PID namespace of its own ({why}); set hostPID: true \
             or, to try inpod, with ztunnel_peer = uid"
        );
    }
    Ok(())
}

/// Returns why the broker must be in a PID namespace of its own.
fn why_own_namespace(processes: &Processes) -> Option<&'static str> {
    // Within a cgroup namespace, containers of the same pod appear as siblings.
    let is_same_pod = match processes.own.pod() {
        Some(own) => processes.first.pod() == Some(own),
        None => processes.is_contained && processes.first.pod().as_deref() == Some("/.."),
    };
    if processes.own_pid == 1 {
        Some("process 1 is this one")
    } else if processes.is_contained && processes.first == processes.own {
        Some("process 1 is in this container")
    } else {
        is_same_pod.then_some("process 1 is in this pod")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "4d2f0c8e4d2f0c8e4d2f0c8e4d2f0c8e4d2f0c8e4d2f0c8e4d2f0c8e4d2f0c8e";

    fn cgroup(path: &str) -> Cgroup {
        Cgroup::parse(&format!("0::{path}\n"))
    }

    fn processes(own: &str, is_contained: bool, first: &str) -> Option<&'static str> {
        why_own_namespace(&Processes {
            own_pid: 4711,
            own: cgroup(own),
            is_contained,
            first: cgroup(first),
        })
    }

    fn in_pod(pod: char, container: char) -> String {
        let uid = "11111111_2222_3333_4444_555555555555".replace('1', &pod.to_string());
        let id = container.to_string().repeat(64);
        format!("/kubepods.slice/kubepods-pod{uid}.slice/cri-containerd-{id}.scope")
    }

    #[test]
    fn process_1_of_its_own_namespace_cannot_identify_peers() {
        let processes = Processes {
            own_pid: 1,
            own: cgroup("/system.slice/a.service"),
            is_contained: false,
            first: cgroup("/system.slice/a.service"),
        };
        assert!(why_own_namespace(&processes).is_some());
    }

    #[test]
    fn where_process_1_is_the_nodes_every_peer_is_identified() {
        for (own, is_contained, first) in [
            ("/system.slice/ztunnel-broker.service", false, "/init.scope"),
            // Neither systemd nor containers.
            ("/", false, "/"),
            (in_pod('a', 'b').as_str(), false, "/init.scope"),
            ("/", true, "/../../../init.scope"),
            // A node that runs in a container.
            ("/", true, "/../../../../../init.scope"),
            // Process 1 is in the root cgroup, and the broker's cgroup has different depths.
            ("/", true, "/.."),
            ("/", true, "/../.."),
            ("/", true, "/../../.."),
        ] {
            let why = processes(own, is_contained, first);
            assert_eq!(why, None, "{own} {first}");
        }
    }

    #[test]
    fn a_process_1_in_the_same_container_or_pod_is_not_the_nodes() {
        let pause = format!("/../cri-containerd-{ID}.scope");
        for (own, is_contained, first) in [
            // The container's own init process.
            ("/", true, "/"),
            (&in_pod('a', 'b'), false, in_pod('a', 'b').as_str()),
            // A pod with shareProcessNamespace.
            (&in_pod('a', 'b'), false, &in_pod('a', 'c')),
            ("/", true, &pause),
        ] {
            let why = processes(own, is_contained, first);
            assert!(why.is_some(), "{own} {first}");
        }
    }
}
