//! One ztunnel, which dies, hangs, and is replaced by another beside it.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::symlink,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use integration::Node;
use nix::sys::signal::Signal;
use serde_json::Value;

#[derive(Debug)]
pub(crate) struct Ztunnel {
    pub(crate) name: String,
    pub(crate) since: Instant,
    /// The time of its SIGTERM.
    pub(crate) leaves: Option<Instant>,
}

/// The time that a ztunnel gives its connections at SIGTERM, in seconds.
const DRAIN: &str = "5";

/// It cuts connections this long after SIGTERM at the earliest.
pub(crate) const DRAINED: Duration = Duration::from_millis(4500);

impl Ztunnel {
    pub(crate) fn start(node: &Node, number: u32) -> anyhow::Result<Self> {
        let name = format!("ztunnel-{number}");
        // An hour's access log would fill the memory.
        let log = node
            .access_log()
            .with_file_name(format!("access-{number}.json"));
        symlink("/dev/null", log)?;
        let since = Instant::now();
        node.start_ztunnel_as(&name, &["--termination-deadline-seconds", DRAIN])?;
        Ok(Self {
            name,
            since,
            leaves: None,
        })
    }

    /// Returns whether it is ready, and the UIDs and inodes of the pods that it serves.
    pub(crate) fn state(&self, node: &Node) -> anyhow::Result<(bool, BTreeSet<(String, u64)>)> {
        let state = node.ztunnel_state_of(&self.name)?;
        let is_ready = state.get("ready") == Some(&Value::Bool(true));
        let pods = state.get("pods").and_then(Value::as_array);
        let pods = pods.context("no pods")?.iter().filter_map(|pod| {
            let is_running = pod.get("state") == Some(&"running".into());
            let uid = pod.get("uid")?.as_str()?.to_owned();
            let inode = pod.pointer("/netns/ino")?.as_u64()?;
            is_running.then_some((uid, inode))
        });
        Ok((is_ready, pods.collect()))
    }

    pub(crate) fn leave(&mut self, node: &Node) -> anyhow::Result<()> {
        self.leaves = Some(Instant::now());
        node.signal(&self.name, Signal::SIGTERM)
    }

    /// Detects a process that has ended and was not waited for.
    pub(crate) fn has_ended(&self, node: &Node) -> anyhow::Result<bool> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", node.pid(&self.name)?))?;
        Ok(stat
            .rsplit_once(") ")
            .is_some_and(|(_, state)| state.starts_with('Z')))
    }
}
