//! A killed netconfig takes its iptables program with it, and its successor completes the rules.

use std::{
    fs,
    os::unix::fs::symlink,
    path::Path,
    time::{Duration, Instant},
};

use netconfig::{Backend, Family};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tempfile::TempDir;

use crate::backends::{
    process::{Netconfig, apply_by, pod_netns, programs_in},
    tools::{IPTABLES, applied, everything, program, saved, write_script},
};
use crate::programs::install_program;

/// Creates a `/usr/sbin` with iptables, of which one program, from [`delay`] on, reports that it
/// runs and then sleeps.
fn slow(name: &str, running: &Path) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    let real = directory.path().join("real");
    fs::create_dir(&real).unwrap();
    for binary in ["xtables-nft-multi", "xtables-legacy-multi"] {
        install_program(&Path::new("/usr/sbin").join(binary), &real.join(binary));
    }
    for backend in IPTABLES {
        let binary = match backend {
            Backend::IptablesNft => "xtables-nft-multi",
            Backend::Nftables | Backend::IptablesLegacy => "xtables-legacy-multi",
        };
        for family in Family::ALL {
            for act in ["save", "restore"] {
                let found = program(backend, family, act);
                symlink(format!("/usr/sbin/real/{binary}"), real.join(found)).unwrap();
                if found != name {
                    symlink(format!("real/{found}"), directory.path().join(found)).unwrap();
                }
            }
        }
    }
    let script = format!(
        "[ -e {0}.slow ] || exec /usr/sbin/real/{name} \"$@\"; sleep 60 & echo $$ $! > {0}.new; mv {0}.new {0}; wait; exec /usr/sbin/real/{name} \"$@\"",
        running.display()
    );
    write_script(&directory.path().join(name), &script);
    directory
}

/// Waits until netconfig is ready, to spare its preflight check.
async fn delay(netconfig: &Netconfig, running: &Path) {
    netconfig.until_ready().await;
    fs::write(format!("{}.slow", running.display()), "").unwrap();
}

fn running(path: &Path) -> [Pid; 2] {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        if let Ok(text) = fs::read_to_string(path) {
            let pids: Vec<i32> = text
                .split_whitespace()
                .map(|pid| pid.parse().unwrap())
                .collect();
            return [Pid::from_raw(pids[0]), Pid::from_raw(pids[1])];
        }
        assert!(Instant::now() < deadline, "the program was not started");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn is_gone(pid: Pid) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/stat"));
    status.map_or(true, |status| status.contains(") Z "))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_program_dies_with_netconfig_and_the_next_one_makes_it_whole() {
    for backend in IPTABLES {
        let run_dir = tempfile::tempdir().unwrap();
        let at_work = run_dir.path().join("at-work");
        // The IPv6 program runs second: the IPv4 rules exist by then.
        let programs = slow(program(backend, Family::V6, "restore"), &at_work);
        let fresh = pod_netns();
        let mut first = Netconfig::start(
            run_dir.path(),
            backend.name(),
            &programs_in(programs.path()),
        )
        .await;
        first.claim(&fresh).await;
        delay(&first, &at_work).await;
        let call = tokio::spawn(apply_by(first.client.clone()));
        let [script, nap] = tokio::task::spawn_blocking(move || running(&at_work))
            .await
            .unwrap();
        assert!(!is_gone(script));
        drop(first);
        let deadline = Instant::now() + Duration::from_secs(20);
        while !is_gone(script) {
            assert!(Instant::now() < deadline, "the program outlives netconfig");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        kill(nap, Signal::SIGKILL).unwrap();
        call.await.unwrap().unwrap_err();
        assert!(saved(&fresh, backend, Family::V4).contains("INPOD_OUTPUT"));
        assert!(!saved(&fresh, backend, Family::V6).contains("INPOD_OUTPUT"));

        let mut second = Netconfig::start(run_dir.path(), backend.name(), "").await;
        second.claim(&fresh).await;
        assert_ne!(second.differences().await, [""; 0]);
        assert!(second.apply().await.unwrap().changed);
        assert_eq!(second.differences().await, [""; 0]);
        assert!(!second.apply().await.unwrap().changed);
        let rules = |text: String| {
            text.split(backend.name())
                .skip(1)
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            rules(everything(&fresh)).len(),
            rules(everything(&applied(backend))).len()
        );
        // netconfig rereads what it wrote, for watchers.
        let locks = run_dir.path().join("netconfig/locks");
        let deadline = Instant::now() + Duration::from_secs(20);
        while fs::read_dir(&locks).unwrap().count() > 0 {
            assert!(Instant::now() < deadline, "a lock file is left");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// The error reports the timeout.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_that_does_not_end_in_time_is_killed() {
    let backend = Backend::IptablesNft;
    let run_dir = tempfile::tempdir().unwrap();
    let at_work = run_dir.path().join("at-work");
    let programs = slow(program(backend, Family::V6, "restore"), &at_work);
    let fresh = pod_netns();
    let before = everything(&fresh);
    let mut netconfig = Netconfig::start(
        run_dir.path(),
        backend.name(),
        &programs_in(programs.path()),
    )
    .await;
    netconfig.claim(&fresh).await;
    delay(&netconfig, &at_work).await;
    let status = netconfig.apply().await.unwrap_err();
    let failure = inpod_proto::failure_of(&status);
    assert_eq!(failure.reason, inpod_types::Reason::BackendBusy);
    assert!(
        failure
            .message
            .contains("ip6tables-nft-restore did not end within 5s"),
        "{failure:?}"
    );
    assert_eq!(failure.undo_failures, [""; 0]);
    for pid in running(&at_work) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !is_gone(pid) {
            assert!(Instant::now() < deadline, "{pid} was not killed");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    assert_eq!(everything(&fresh), before);
}
