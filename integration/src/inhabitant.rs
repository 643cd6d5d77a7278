use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    process::{Child, Command},
};

use anyhow::{Context as _, ensure};

use crate::{Pod, TIMEOUT, eventually};

/// A process in a pod, like a container's, which is killed on drop.
#[derive(Debug)]
pub struct Inhabitant(Child);

impl Inhabitant {
    /// Starts a process, and returns once the process is in the pod.
    pub fn of(pod: &Pod) -> anyhow::Result<Self> {
        let net = format!("--net={}", pod.path().display());
        let child = Command::new("nsenter")
            .arg(net)
            .args(["sleep", "infinity"])
            .spawn()
            .context("cannot start a process in the pod")?;
        let path = format!("/proc/{}/ns/net", child.id());
        let own = pod.netns.id().inode;
        let inhabitant = Self(child);
        eventually("it has entered", TIMEOUT, || {
            ensure!(fs::metadata(&path)?.ino() == own, "not yet");
            anyhow::Ok(())
        })?;
        Ok(inhabitant)
    }
}

impl Inhabitant {
    pub fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Inhabitant {
    fn drop(&mut self) {
        // The kill fails if the process has ended already.
        self.0.kill().unwrap_or_default();
        self.0.wait().map(drop).unwrap_or_default();
    }
}
