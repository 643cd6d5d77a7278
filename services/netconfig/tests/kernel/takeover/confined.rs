//! A netconfig that cannot work becomes unready before a pod is affected, and recovers.

use std::{
    io::{BufRead as _, BufReader},
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use inpod_proto::failure_of;
use inpod_types::Reason;

use crate::takeover::process::{Netconfig, command, command_in};

/// A user namespace that owns neither mounts nor pids cannot mount a procfs, as under a
/// seccomp profile without fsopen(2).
const WITHOUT_MOUNTS: [&str; 4] = ["--user", "--map-root-user", "--net", "--mount"];

/// Runtimes mount it so for unprivileged containers. An LSM that denies writes has the same effect.
const READ_ONLY_SYSCTLS: &str =
    "mount --bind /proc/sys /proc/sys; mount -o remount,bind,ro /proc/sys;";

fn beside(process: &Child, namespaces: &[&str]) -> Command {
    let mut command = Command::new("nsenter");
    command.arg(format!("--target={}", process.id()));
    command.args(namespaces);
    command
}

struct Pod(Child);

impl Pod {
    fn start(netconfig: &Child) -> Self {
        let mut command = beside(netconfig, &["--user", "--preserve-credentials"]);
        command
            .args(["unshare", "--net", "sh", "-ec"])
            .arg("ip link set lo up; ip addr add 10.9.0.1/24 dev lo; echo ready; exec cat")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        let said = child.stdout.take().unwrap();
        BufReader::new(said).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n", "no pod in the user namespace");
        Self(child)
    }

    fn path(&self) -> PathBuf {
        format!("/proc/{}/ns/net", self.0.id()).into()
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_may_not_write_a_pods_sysctls_is_not_ready_for_the_reason_of_an_add_until_it_may() {
    let run_dir = tempfile::tempdir().unwrap();
    let command = command_in(&WITHOUT_MOUNTS, run_dir.path(), READ_ONLY_SYSCTLS);
    let mut netconfig = Netconfig::by(command, run_dir.path()).await;
    let why = "cannot write the sysctl net.ipv4.tcp_migrate_req";
    let refused = netconfig.until_refused().await;
    assert!(
        refused.contains("KERNEL_REFUSED") && refused.contains(why),
        "{refused}"
    );
    assert!(!netconfig.is_ready());
    let pod = Pod::start(&netconfig.process);
    netconfig.claim_at(&pod.path()).await;
    let failure = failure_of(&netconfig.apply().await.unwrap_err());
    assert_eq!(failure.reason, Reason::KernelRefused);
    assert!(failure.message.contains(why), "{failure:?}");

    let allowed = beside(&netconfig.process, &["--user", "--mount"])
        .args(["umount", "/proc/sys"])
        .status();
    assert!(allowed.unwrap().success());
    netconfig.until_ready().await;
    assert!(netconfig.apply().await.unwrap().changed);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_add_makes_it_look_again_and_lose_its_readiness() {
    let run_dir = tempfile::tempdir().unwrap();
    let command = command_in(&WITHOUT_MOUNTS, run_dir.path(), "");
    let mut netconfig = Netconfig::by(command, run_dir.path()).await;
    netconfig.until_ready().await;
    let pod = Pod::start(&netconfig.process);
    let denied = beside(&netconfig.process, &["--user", "--mount"])
        .args(["sh", "-ec", READ_ONLY_SYSCTLS])
        .status();
    assert!(denied.unwrap().success());
    netconfig.claim_at(&pod.path()).await;
    assert!(netconfig.is_ready(), "nobody has asked for anything");
    netconfig.apply().await.unwrap_err();
    let refused = netconfig.until_refused().await;
    assert!(refused.contains("KERNEL_REFUSED"), "{refused}");
    netconfig.until_not_ready().await;
}

#[test]
fn another_way_to_write_rules_is_refused_at_start_with_what_the_kernel_needs() {
    let run_dir = tempfile::tempdir().unwrap();
    let output = command(run_dir.path(), "")
        .env("INPOD_BACKEND", "iptables-nft")
        .output()
        .unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success());
    assert!(errors.contains("CONFIG_NF_TABLES_INET"), "{errors}");
}
