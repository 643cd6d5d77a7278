//! The name of a netns in a directory, as runtimes make it.

use std::process::Command;

use inpod_proto::types::v1::NetnsRef;

use crate::{harness::at, support::Fresh};

/// Where a runtime gives a netns a name.
pub(crate) struct Name(pub(crate) String);

impl Name {
    /// The path carries the test's pid and a word of its own: tests run at once.
    pub(crate) fn new(fresh: &Fresh, word: &str) -> Self {
        std::fs::create_dir_all("/run/netns").unwrap();
        let name = Self(format!("/run/netns/{word}-{}", std::process::id()));
        std::fs::write(&name.0, "").unwrap();
        let netns = fresh.netns.path().to_str().unwrap();
        run("mount", &["--bind", netns, &name.0]);
        name
    }

    /// As a mount without propagation shows it: the file, with nothing mounted on it. Lazily, as runtimes do: who
    /// holds the netns may hold the mount.
    pub(crate) fn unmount(&self) {
        run("umount", &["--lazy", &self.0]);
    }

    /// What the plugin saw when it was there.
    pub(crate) fn believed(&self, fresh: &Fresh) -> NetnsRef {
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
