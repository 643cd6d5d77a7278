//! Real cgroups with the names of pods', in the hierarchy of version 2. They go with the value.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::Context as _;
use integration::{Node, PATIENCE, Pod, eventually};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

pub(crate) struct PodCgroups {
    root: PathBuf,
    above: PathBuf,
}

impl PodCgroups {
    pub(crate) fn new(node: &Node) -> anyhow::Result<Self> {
        let root = node.run_dir().with_file_name("cgroup");
        fs::create_dir(&root)?;
        let none = None::<&str>;
        mount(none, &root, Some("cgroup2"), MsFlags::empty(), none)
            .context("cannot mount cgroup2")?;
        // Another isolation on this machine may have a node of the same name.
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos();
        let above = root.join(format!("inpod-test-{now}-{}", node.name()));
        fs::create_dir(&above).context("cannot make a cgroup")?;
        Ok(Self { root, above })
    }

    /// Makes a process one of the pod's sandbox, as containerd and the systemd driver do.
    pub(crate) fn put(&self, pod: &Pod, pid: u32) -> anyhow::Result<()> {
        let uid = pod.spec.uid.replace('-', "_");
        let id = &pod.container_id;
        let path = format!("kubepods-besteffort-pod{uid}.slice/cri-containerd-{id}.scope");
        let path = self.above.join(path);
        fs::create_dir_all(&path).context("cannot make a cgroup")?;
        Ok(fs::write(path.join("cgroup.procs"), pid.to_string())?)
    }
}

impl Drop for PodCgroups {
    fn drop(&mut self) {
        // A process that has just ended may still be counted.
        eventually("the cgroups go", PATIENCE, || remove(&self.above)).unwrap_or_default();
        umount2(&self.root, MntFlags::MNT_DETACH).unwrap_or_default();
    }
}

fn remove(path: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove(&entry.path())?;
        }
    }
    fs::remove_dir(path)
}
