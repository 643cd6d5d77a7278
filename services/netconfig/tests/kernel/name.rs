//! Netns names in a directory, as runtimes make them.

use std::process::Command;

use inpod_proto::types::v1::NetnsRef;

use crate::harness::at;
use crate::support::Fresh;

pub(crate) struct Name(pub(crate) String);

impl Name {
    /// Tests run concurrently: the path contains the test's pid and a suffix.
    pub(crate) fn new(fresh: &Fresh, suffix: &str) -> Self {
        std::fs::create_dir_all("/run/netns").unwrap();
        let name = Self(format!("/run/netns/{suffix}-{}", std::process::id()));
        std::fs::write(&name.0, "").unwrap();
        let netns = fresh.netns.path().to_str().unwrap();
        run("mount", &["--bind", netns, &name.0]);
        name
    }

    /// Leaves the file without a mount, as a mount namespace without propagation sees it. Unmounts lazily, as
    /// runtimes do: a process in the netns may keep the mount busy.
    pub(crate) fn unmount(&self) {
        run("umount", &["--lazy", &self.0]);
    }

    /// The reference that the plugin saw while the netns was mounted.
    pub(crate) fn expected_netns(&self, fresh: &Fresh) -> NetnsRef {
        let id = fresh.netns.id();
        NetnsRef {
            device: Some(id.device),
            inode: Some(id.inode),
            ..at(&self.0)
        }
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        drop(Command::new("umount").arg("-ql").arg(&self.0).status());
        drop(std::fs::remove_file(&self.0));
    }
}

fn run(program: &str, arguments: &[&str]) {
    let status = Command::new(program).args(arguments).status().unwrap();
    assert!(status.success(), "{program} {arguments:?}");
}
