//! Checks whether the broker sees its peers' PIDs.

use std::{fs, io, process};

use inpod_service::peer::Cgroup;

/// The name of the initial cgroup namespace (`CGROUP_NS_INIT_INO` in linux/nsfs.h).
const FIRST_CGROUP_NAMESPACE: &str = "cgroup:[4026531835]";

#[derive(Debug, thiserror::Error)]
pub enum HostPidError {
    #[error("cannot read {path}")]
    Read {
        path: &'static str,
        source: io::Error,
    },
    /// In a separate PID namespace, processes of other pods have no PID.
    #[error(
        "cannot identify the peers of ZDS: this process is in a PID namespace of its own ({0}); set hostPID: true or, to try \
         inpod, with ztunnel_peer = uid"
    )]
    OwnPidNamespace(&'static str),
}

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
pub fn check() -> Result<(), HostPidError> {
    let read =
        |path| fs::read_to_string(path).map_err(|source| HostPidError::Read { path, source });
    let path = "/proc/self/ns/cgroup";
    // The link is absent if the kernel has no cgroup namespaces.
    let namespace = fs::read_link(path).ok();
    let processes = Processes {
        own_pid: process::id(),
        own: Cgroup::parse(&read("/proc/self/cgroup")?),
        is_contained: namespace.is_some_and(|it| it.as_os_str() != FIRST_CGROUP_NAMESPACE),
        first: Cgroup::parse(&read("/proc/1/cgroup")?),
    };
    check_processes(&processes)
}

fn check_processes(processes: &Processes) -> Result<(), HostPidError> {
    if processes.own_pid == 1 {
        return Err(HostPidError::OwnPidNamespace("process 1 is this one"));
    }
    if processes.is_contained && processes.first == processes.own {
        return Err(HostPidError::OwnPidNamespace(
            "process 1 is in this container",
        ));
    }
    // Within a cgroup namespace, containers of the same pod appear as siblings.
    let is_same_pod = match processes.own.pod() {
        Some(own) => processes.first.pod() == Some(own),
        None => processes.is_contained && processes.first.pod().as_deref() == Some("/.."),
    };
    if is_same_pod {
        return Err(HostPidError::OwnPidNamespace("process 1 is in this pod"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "4d2f0c8e4d2f0c8e4d2f0c8e4d2f0c8e4d2f0c8e4d2f0c8e4d2f0c8e4d2f0c8e";

    fn cgroup(path: &str) -> Cgroup {
        Cgroup::parse(&format!("0::{path}\n"))
    }

    fn processes(own: &str, is_contained: bool, first: &str) -> Result<(), HostPidError> {
        check_processes(&Processes {
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
        let error = check_processes(&processes).unwrap_err().to_string();
        assert!(
            error.contains("hostPID") && error.contains("ztunnel_peer = uid"),
            "{error}"
        );
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
            assert!(processes(own, is_contained, first).is_ok(), "{own} {first}");
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
            assert!(
                processes(own, is_contained, first).is_err(),
                "{own} {first}"
            );
        }
    }
}
