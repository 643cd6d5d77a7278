//! Test builders with defaults for everything but the fact under test.

use std::{cell::Cell, fs::File, sync::LazyLock};

use inpod_types::{NetnsId, PodUid, Revision, SandboxRef, Workload, WorkloadInfo};

use crate::descriptors::Descriptor;

thread_local! {
    static STEPS: Cell<u64> = const { Cell::new(0) };
}

/// Counts a decision about a pod, or an entry that a pass over all entries looks at.
pub(crate) fn count_step() {
    STEPS.set(STEPS.get() + 1);
}

/// Returns the number of steps since the last call.
pub(crate) fn take_steps() -> u64 {
    STEPS.take()
}

pub(crate) fn uid(text: &str) -> PodUid {
    text.parse().unwrap()
}

pub(crate) fn sandbox(container: &str) -> SandboxRef {
    SandboxRef {
        network_name: "net".parse().unwrap(),
        container_id: container.parse().unwrap(),
        ifname: "eth0".parse().unwrap(),
    }
}

pub(crate) fn info(name: &str) -> WorkloadInfo {
    WorkloadInfo {
        name: name.parse().unwrap(),
        namespace: "default".parse().unwrap(),
        service_account: "sa".parse().unwrap(),
    }
}

pub(crate) fn netns(inode: u64) -> NetnsId {
    NetnsId {
        device: 4,
        inode,
        cookie: inode,
    }
}

/// Returns a descriptor of /dev/null, which stands for a netns.
pub(crate) fn descriptor(inode: u64) -> Descriptor {
    static NULL: LazyLock<Descriptor> = LazyLock::new(|| {
        let null = File::open("/dev/null").unwrap();
        Descriptor::assumed(null.into(), netns(0))
    });
    NULL.of(netns(inode))
}

/// Returns a workload. The inode is 0 for an unknown netns.
pub(crate) fn workload(container: &str, pod: &str, inode: u64, revision: u64) -> Workload {
    Workload {
        sandbox: sandbox(container),
        uid: uid(pod),
        info: info(pod),
        netns: (inode != 0).then(|| netns(inode)),
        revision: Revision(revision),
    }
}
