//! Other processes' changes of claimed netns, as watchers see them. Needs root.

mod calls;
mod ends;
mod imitation;
/// Tests of times, which nothing may disturb.
mod alone {
    mod many;
}
mod sidecar;
mod udp;
mod watcher;

use std::process::{Child, Command};

use inpod_proto::netconfig::v1::RemovePhase;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::harness::{Netconfig, at, pod_netns};
use watcher::{Watcher, eventually, quiet};

/// netconfig's capabilities in the deployment.
const RIGHTS: &str = "-all,+sys_admin,+net_admin,+net_raw,+sys_ptrace,+net_broadcast";

fn command(rights: &str) -> Command {
    let found = Command::new("setpriv").arg("--version").output();
    assert!(found.is_ok(), "setpriv is missing: install util-linux");
    let mut command = Command::new("setpriv");
    command
        .args(["--bounding-set", rights, "--inh-caps", "-all", "--"])
        .arg(env!("CARGO_BIN_EXE_netconfig"));
    command
}

/// Starts it with a cluster's rights.
pub(crate) async fn start(arguments: &[&str]) -> Netconfig {
    Netconfig::start_by(command(RIGHTS), arguments).await
}

/// Without the right, drift would stay unseen until the next read by the clock.
#[test]
fn without_net_broadcast_it_ends_and_names_the_right() {
    let run_dir = tempfile::tempdir().unwrap();
    let rights = RIGHTS.trim_end_matches(",+net_broadcast");
    let output = command(rights)
        .env("INPOD_RUN_DIR", run_dir.path())
        .env("INPOD_PEER", "uid")
        .output()
        .unwrap();
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{log}");
    assert!(log.contains("NET_BROADCAST"), "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_own_change_is_told_once() {
    let mut netconfig = start(&[]).await;
    let fresh = pod_netns();
    netconfig.claim("c1", &fresh).await.unwrap();
    let (first, watcher) = Watcher::open(&mut netconfig).await;
    let [state] = first.as_slice() else {
        unreachable!("one claim, one state: {first:?}");
    };
    assert_eq!((state.fingerprint.as_str(), state.intact), ("", false));
    quiet().await;
    assert_eq!(watcher.count(), 0, "the state was reported already");
    let reads = netconfig.metric("drift_reads_total").await;

    let applied = netconfig.apply("c1").await;
    let state = watcher.wait_for_states("c1", 1).await;
    assert_eq!(
        (state.fingerprint, state.intact),
        (applied.fingerprint, true)
    );
    netconfig.apply("c1").await;
    quiet().await;
    assert_eq!(watcher.count(), 1);
    // netconfig reads its changes back at once, and not again after their notifications.
    assert_eq!(netconfig.metric("drift_reads_total").await, reads);

    netconfig.remove("c1", RemovePhase::Final).await;
    let state = watcher.wait_for_states("c1", 2).await;
    assert_eq!((state.fingerprint.as_str(), state.intact), ("", false));
    quiet().await;
    assert_eq!(watcher.count(), 2);
    assert_eq!(netconfig.metric("drift_told_total").await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_watcher_is_told_the_state_and_then_the_same_changes() {
    let mut netconfig = start(&[]).await;
    let fresh = pod_netns();
    netconfig.claim("c1", &fresh).await.unwrap();
    let (_, early) = Watcher::open(&mut netconfig).await;
    let applied = netconfig.apply("c1").await;
    early.wait_for_states("c1", 1).await;
    let (first, late) = Watcher::open(&mut netconfig).await;
    assert_eq!(first[0].fingerprint, applied.fingerprint);
    fresh.nft("flush ruleset");
    for (watcher, times) in [(&early, 2), (&late, 1)] {
        assert!(!watcher.wait_for_states("c1", times).await.intact);
    }
    assert!(netconfig.release("c1").await);
    netconfig.claim("c1", &fresh).await.unwrap();
    // A claim without rules is not reported, rules are.
    let again = netconfig.apply("c1").await;
    for (watcher, times) in [(&early, 3), (&late, 2)] {
        let state = watcher.wait_for_states("c1", times).await;
        assert_eq!(state.fingerprint, again.fingerprint);
        assert_eq!(watcher.ends(), [crate::harness::wire("c1")]);
    }
}

async fn stop(process: &Child) -> Pid {
    let pid = Pid::from_raw(process.id().try_into().unwrap());
    kill(pid, Signal::SIGSTOP).unwrap();
    let tasks = format!("/proc/{pid}/task");
    eventually("the process does not stop", async || {
        let tasks = std::fs::read_dir(&tasks).unwrap();
        let stats = tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("stat")));
        stats.into_iter().all(|stat| stat.unwrap().contains(") T "))
    })
    .await;
    pid
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_missed_because_there_was_no_room_for_it_is_found() {
    let mut netconfig = start(&["--event-buffer-bytes", "1024"]).await;
    let pods: Vec<_> = (0..12).map(|_| pod_netns()).collect();
    let names: Vec<_> = (0..pods.len()).map(|number| format!("c{number}")).collect();
    for (pod, name) in pods.iter().zip(&names) {
        netconfig.claim(name, pod).await.unwrap();
        netconfig.apply(name).await;
    }
    let (first, watcher) = Watcher::open(&mut netconfig).await;
    assert!(first.iter().all(|state| state.intact), "{first:?}");
    quiet().await;
    let events = "drift_events_total{netns=\"claimed\"}";
    let (heard, overruns) = (
        netconfig.metric(events).await,
        netconfig.metric("drift_overruns_total").await,
    );
    let pid = stop(&netconfig.process).await;
    pods.iter().for_each(|pod| drop(pod.nft("flush ruleset")));
    kill(pid, Signal::SIGCONT).unwrap();
    for name in &names {
        assert!(!watcher.wait_for_states(name, 1).await.intact);
    }
    let heard = netconfig.metric(events).await - heard;
    assert!(heard < 12, "nothing was missed: {heard} messages came");
    assert!(netconfig.metric("drift_overruns_total").await > overruns);
}

/// Own user namespace and netns, as in a pod with `hostUsers: false`.
struct Foreign(Child);

impl Foreign {
    async fn new() -> Self {
        let arguments = ["--user", "--map-root-user", "--net", "sleep", "60"];
        let child = Command::new("unshare").args(arguments).spawn().unwrap();
        let foreign = Self(child);
        eventually("unshare makes no namespaces", async || {
            let command = std::fs::read_to_string(format!("/proc/{}/comm", foreign.0.id()));
            command.is_ok_and(|command| command.trim() == "sleep")
        })
        .await;
        for arguments in ["ip link set lo up", "ip addr add 10.9.0.1/32 dev lo"] {
            foreign.run(arguments);
        }
        foreign
    }

    fn run(&self, arguments: &str) {
        let pid = self.0.id().to_string();
        let status = Command::new("nsenter")
            .args(["--target", &pid, "--user", "--net", "--"])
            .args(arguments.split(' '))
            .status();
        assert!(status.unwrap().success(), "{arguments}");
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_netns_of_another_user_namespace_is_heard_too() {
    let mut netconfig = start(&[]).await;
    let foreign = Foreign::new().await;
    let path = format!("/proc/{}/ns/net", foreign.0.id());
    let claimed = netconfig.claim_at("c1", at(&path), &["10.9.0.1"]).await;
    claimed.unwrap();
    netconfig.apply("c1").await;
    let (first, watcher) = Watcher::open(&mut netconfig).await;
    assert!(first[0].intact, "{first:?}");
    foreign.run("nft flush ruleset");
    assert!(!watcher.wait_for_states("c1", 1).await.intact);
}
