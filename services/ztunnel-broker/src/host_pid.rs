//! Whether the pids of those who connect can be seen from here.

use std::{fs, io, process};

use inpod_service::peer::Cgroup;

/// The cgroup namespace that the kernel starts with (`CGROUP_NS_INIT_INO` in linux/nsfs.h).
const FIRST_CGROUP_NAMESPACE: &str = "cgroup:[4026531835]";

/// Why nobody could be proven.
#[derive(Debug, thiserror::Error)]
pub enum HostPidError {
    /// A file of procfs cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The pids of other pods are not seen.
    #[error(
        "cannot identify the peers of ZDS: this process is in a PID namespace of its own ({0}); set hostPID: true or, to try \
         inpod, with ztunnel_peer = uid"
    )]
    OwnPidNamespace(&'static str),
}

/// What is known of this process and of the first one of its pid namespace.
#[derive(Debug)]
struct Processes {
    /// This process's pid.
    own_pid: u32,
    own: Cgroup,
    /// Whether paths are told from this process's own container on, so that it sees itself at the root.
    is_contained: bool,
    /// The cgroup of process 1.
    first: Cgroup,
}

/// Whether the first process that is seen from here is the node's. One in this container or this pod has no other pods
/// below it.
///
/// # Errors
///
/// See [`Blind`].
pub fn check() -> Result<(), HostPidError> {
    let read =
        |path| fs::read_to_string(path).map_err(|source| HostPidError::Read { path, source });
    let path = "/proc/self/ns/cgroup";
    // Absent where the kernel has no such namespaces.
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
    // Seen from a cgroup namespace, containers of the same pod are siblings.
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
    fn process_1_of_its_own_namespace_sees_nobody() {
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
    fn where_process_1_is_the_nodes_everybody_is_seen() {
        for (own, is_contained, first) in [
            ("/system.slice/ztunnel-broker.service", false, "/init.scope"),
            // Neither systemd nor containers.
            ("/", false, "/"),
            (in_pod('a', 'b').as_str(), false, "/init.scope"),
            ("/", true, "/../../../init.scope"),
            // A node in a container.
            ("/", true, "/../../../../../init.scope"),
            // Process 1 at the root, whatever is how deep.
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
            // The container's own init.
            ("/", true, "/"),
            (&in_pod('a', 'b'), false, in_pod('a', 'b').as_str()),
            // shareProcessNamespace.
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
