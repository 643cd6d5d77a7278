//! A pod with `hostUsers: false`: its netns belongs to another user namespace.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    process::{Child, Command, Stdio},
};

use inpod_linux::Netns;
use netconfig::{apply::Phase, rules::Redirection};

use crate::scenarios;
use crate::support::{ambient, plain, roots, sandbox};

/// A process with its own user namespace and netns.
struct Pod(Child);

impl Pod {
    fn start() -> Self {
        let mut command = Command::new("unshare");
        command
            .args(["--user", "--map-root-user", "--net", "sh", "-c"])
            .arg("ip link set lo up && echo ready && exec cat")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        let said = child.stdout.take().unwrap();
        BufReader::new(said).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n", "unshare --user does not work here");
        Self(child)
    }

    fn netns(&self) -> Netns {
        let path = format!("/proc/{}/ns/net", self.0.id());
        Netns::open(path.as_ref(), &roots()).unwrap()
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn a_netns_of_another_user_namespace_is_programmed() {
    let pod = Pod::start();
    let users = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/user")).unwrap();
    assert_ne!(users(&pod.0.id().to_string()), users("self"));
    let netns = pod.netns();
    let writer = plain();
    for (name, settings) in scenarios::all() {
        let redirection = Redirection::Ambient(settings);
        let applied = writer.apply(&netns, &redirection, &sandbox("c1")).unwrap();
        assert!(applied.changed, "{name}");
        let verified = writer.verify(&netns, &redirection).unwrap();
        assert_eq!(verified.differences, [""; 0], "{name}");
    }
    writer.remove(&netns, &sandbox("c1"), Phase::Drain).unwrap();
    writer.remove(&netns, &sandbox("c1"), Phase::Final).unwrap();
    let seen = writer.observe(&netns).unwrap();
    assert_eq!(seen.tag, None);
    assert!(
        writer
            .apply(&netns, &ambient(), &sandbox("c1"))
            .unwrap()
            .changed
    );
}
