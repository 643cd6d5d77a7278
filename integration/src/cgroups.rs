use std::{
    cell::RefCell,
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::Context as _;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::{Pod, TIMEOUT, eventually};

static NEXT: AtomicU32 = AtomicU32::new(1);

/// The capabilities of a stock ztunnel (Istio's chart), for [`Cgroups::container`].
pub const ZTUNNEL_CAPABILITIES: &str = "-all,+net_admin,+net_raw,+sys_admin";

/// Returns the setting `host_cgroups` that makes this process a process of the host. Not all machines run tests in a
/// cgroup with a name that inpod knows.
pub(crate) fn host_cgroups() -> String {
    let text = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let paths = text.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    let paths: Vec<_> = paths.filter(|path| *path != "/").collect();
    paths.join(",")
}

/// Cgroups with the names of pods and containers, in the version 2 hierarchy. The value must outlive the processes in
/// its cgroups, because drop removes the cgroups.
#[derive(Debug)]
pub struct Cgroups {
    mount: PathBuf,
    above: PathBuf,
    made: RefCell<Vec<PathBuf>>,
}

impl Cgroups {
    /// Prepares the hierarchy without creating a cgroup. Fails without root.
    pub fn new() -> anyhow::Result<Self> {
        // A process in another isolation may have the same process number.
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("inpod-test-{now}-{number}");
        let root = PathBuf::from("/run").join(&name);
        fs::create_dir(&root)?;
        let none = None::<&str>;
        mount(none, &root, Some("cgroup2"), MsFlags::empty(), none)
            .context("cannot mount cgroup2")?;
        let cgroups = Self {
            above: root.join(&name),
            mount: root,
            made: RefCell::default(),
        };
        let above = cgroups.above.clone();
        cgroups.make(&above)?;
        Ok(cgroups)
    }

    fn make(&self, path: &Path) -> anyhow::Result<()> {
        if !path.is_dir() {
            fs::create_dir(path).context("cannot make a cgroup")?;
            self.made.borrow_mut().push(path.to_owned());
        }
        Ok(())
    }

    pub fn pod(&self, uid: &str) -> anyhow::Result<PathBuf> {
        let parts = [
            "kubepods".to_owned(),
            "burstable".into(),
            format!("pod{uid}"),
        ];
        let mut path = self.above.clone();
        for part in parts {
            path.push(part);
            self.make(&path)?;
        }
        Ok(path)
    }

    /// Puts a process into the cgroup of a pod, with the names that containerd and the systemd driver use.
    pub fn put(&self, pod: &Pod, pid: u32) -> anyhow::Result<()> {
        let uid = pod.spec.uid.replace('-', "_");
        let mut path = self.above.clone();
        let parts = [
            format!("kubepods-besteffort-pod{uid}.slice"),
            format!("cri-containerd-{}.scope", pod.container_id),
        ];
        for part in parts {
            path.push(part);
            self.make(&path)?;
        }
        Ok(fs::write(path.join("cgroup.procs"), pid.to_string())?)
    }

    /// Creates and returns the cgroup of a pod's container, or a cgroup below.
    pub fn path(&self, uid: &str, below: &str) -> anyhow::Result<PathBuf> {
        let mut path = self.pod(uid)?;
        path.push("c".repeat(64));
        self.make(&path)?;
        for part in below.split('/').filter(|part| !part.is_empty()) {
            path.push(part);
            self.make(&path)?;
        }
        Ok(path)
    }

    /// Returns a command line that executes the program after it in a pod's container, with the capabilities of
    /// setpriv's `--bounding-set`. `below` is a cgroup that the container created.
    pub fn container(
        &self,
        uid: &str,
        below: &str,
        capabilities: &str,
    ) -> anyhow::Result<Vec<String>> {
        let path = self.path(uid, below)?;
        let script = format!(
            "echo $$ > {}/cgroup.procs && exec setpriv --bounding-set {capabilities} \"$@\"",
            path.display()
        );
        Ok(["sh", "-c", &script, "sh"].map(str::to_owned).to_vec())
    }
}

impl Drop for Cgroups {
    fn drop(&mut self) {
        for path in self.made.borrow().iter().rev() {
            // The kernel may still count a process that has ended.
            eventually("the cgroup goes", TIMEOUT, || fs::remove_dir(path)).unwrap_or_default();
        }
        umount2(&self.mount, MntFlags::MNT_DETACH).unwrap_or_default();
        fs::remove_dir(&self.mount).unwrap_or_default();
    }
}
