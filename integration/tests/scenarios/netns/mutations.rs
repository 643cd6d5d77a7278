//! Ten thousand faulty calls (variables, standard input, arguments) to a running agent: each is answered as the CNI
//! spec demands, before its deadline, and touches no sandbox but its own.

mod wrong;

use std::{
    collections::BTreeMap,
    fs,
    sync::{Mutex, PoisonError},
    thread,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use integration::{Call, Node, Outcome, Pod, Spec, State, TIMEOUT, eventually};
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
    sys::statvfs::{FsFlags, statvfs},
};
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};
use serde_json::{Value, json};

use crate::netns::mutations::wrong::{Raw, calls};

const CASES: u32 = 10_000;

/// One for each expected core.
const WORKERS: u32 = 2;

/// Change it for other cases; a failed case prints it.
const SEED: u8 = 42;

/// The calls' time limit, in seconds.
const LIMIT: u64 = 5;

/// The spec's codes in use, and the plugin's own.
const CODES: [u64; 11] = [1, 2, 3, 4, 5, 6, 7, 11, 50, 51, 100];

fn good(node: &Node, pod: &Pod) -> Vec<Raw> {
    let attachments = json!([{"containerID": pod.container_id, "ifname": "eth0"}]);
    let add = node
        .call(Call::add, pod)
        .with_key("cniVersion", "1.1.0")
        .timeout_seconds(LIMIT);
    let add = add.with_key("cni.dev/valid-attachments", attachments);
    let verbs = ["ADD", "ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION"];
    verbs
        .map(|verb| Raw::of(add.clone().with_var("CNI_COMMAND", verb)))
        .into()
}

/// Answers by code; 0 for success.
type Seen = Mutex<BTreeMap<u64, u32>>;

/// The spec must allow this code.
fn judge(outcome: &Outcome) -> anyhow::Result<u64> {
    ensure!(
        outcome.took < Duration::from_secs(2 * LIMIT) + TIMEOUT,
        "it was late"
    );
    ensure!(!outcome.stderr.contains("panicked"), "it panicked");
    // Without CNI_COMMAND, the plugin describes itself in two lines.
    let describes_itself = outcome.code == 0 && outcome.stderr.starts_with("inpod-cni ");
    ensure!(
        outcome.stderr.lines().count() <= if describes_itself { 2 } else { 1 },
        "more than one line of log"
    );
    match outcome.code {
        0 if outcome.stdout.is_empty() => Ok(0),
        // Arguments without CNI_COMMAND are a command line.
        2 if outcome.stdout.is_empty() && outcome.stderr.starts_with("Usage: inpod-cni") => Ok(2),
        0 => {
            let document: Value = serde_json::from_str(&outcome.stdout)?;
            ensure!(document.is_object(), "the result is no object");
            Ok(0)
        }
        _ => {
            let (code, words) = outcome.refusal()?;
            ensure!(CODES.contains(&code), "code {code}");
            ensure!(
                words.len() > 4 && words.len() < 4000,
                "{} bytes of words",
                words.len()
            );
            Ok(code)
        }
    }
}

/// Restricts this thread and its programs to writing below `/run`: a wrong state directory must not
/// appear on the machine.
fn confine() -> anyhow::Result<()> {
    unshare(CloneFlags::CLONE_NEWNS).context("a mount namespace")?;
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    for path in mounts.lines().filter_map(|line| line.split(' ').nth(4)) {
        if path == "/run" || path.starts_with("/run/") {
            continue;
        }
        let Ok(known) = statvfs(path) else { continue };
        let mut flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY;
        for (is, keep) in [
            (FsFlags::ST_NOSUID, MsFlags::MS_NOSUID),
            (FsFlags::ST_NODEV, MsFlags::MS_NODEV),
            (FsFlags::ST_NOEXEC, MsFlags::MS_NOEXEC),
        ] {
            if known.flags().contains(is) {
                flags |= keep;
            }
        }
        // Paths that cannot become read-only are checked below.
        mount(None::<&str>, path, None::<&str>, flags, None::<&str>).unwrap_or_default();
    }
    for directory in ["/", "/tmp", "/var", "/etc"] {
        let probe = format!("{directory}/inpod-mutations");
        ensure!(
            fs::create_dir(&probe).is_err(),
            "{directory} can be written to: remove {probe}"
        );
    }
    Ok(())
}

fn work(number: u8, good: Vec<Raw>, paths: Vec<String>, seen: &Seen) -> anyhow::Result<()> {
    confine()?;
    let config = Config {
        cases: CASES / WORKERS,
        failure_persistence: None,
        max_shrink_iters: 500,
        ..Config::default()
    };
    let seed = [SEED.wrapping_add(number); 32];
    let mut runner =
        TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &seed));
    let result = runner.run(&calls(good, paths), |raw| {
        let outcome = raw
            .run()
            .map_err(|error| TestCaseError::fail(format!("{error:#}")))?;
        let judged = judge(&outcome);
        let code =
            judged.map_err(|error| TestCaseError::fail(format!("{error:#}: {outcome:?}")))?;
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        *seen.entry(code).or_default() += 1;
        Ok(())
    });
    match result {
        Ok(()) => Ok(()),
        Err(TestError::Fail(why, raw)) => {
            let stdin = String::from_utf8_lossy(&raw.stdin).into_owned();
            anyhow::bail!("seed {seed:?}: {why}\n{raw:?}\nstdin: {stdin}")
        }
        Err(error) => anyhow::bail!("seed {seed:?}: {error}"),
    }
}

/// Returns all values of `CNI_NETNS` except the sandbox's netns.
fn paths(node: &Node, victim: &Pod, pod: &Pod) -> Vec<String> {
    let place = node.run_dir().with_file_name("odd");
    fs::create_dir(&place).unwrap();
    let odd = |name: &str| place.join(name).display().to_string();
    nix::unistd::mkfifo(&place.join("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    std::os::unix::fs::symlink(pod.path(), place.join("link")).unwrap();
    fs::write(place.join("file"), "").unwrap();
    let text = |path: &std::path::Path| path.display().to_string();
    let plain = [
        "",
        "/",
        ".",
        "/proc/1/ns/net",
        "/proc/self/ns/net",
        "/proc/self/ns/mnt",
        "/dev/null",
        "/run/netns/nobody",
    ];
    let climbing = format!(
        "/run/netns/../netns/{}",
        pod.path().file_name().unwrap().display()
    );
    let made = [
        odd("fifo"),
        odd("link"),
        odd("file"),
        text(victim.path()),
        text(node.netns().path()),
        climbing,
    ];
    plain.map(str::to_owned).into_iter().chain(made).collect()
}

/// Omits the other network's sandbox, for which no call was.
fn left(node: &Node, pod: &Pod) -> anyhow::Result<Vec<inpod_proto::types::v1::SandboxRef>> {
    let claims = node.api().claims()?.into_iter();
    let claims = claims.filter(|claim| {
        claim
            .sandbox
            .as_ref()
            .is_some_and(|it| it.network_name != "othernet")
    });
    claims
        .map(|claim| {
            ensure!(
                claim.path == pod.path().display().to_string(),
                "a claim of another netns: {claim:?}"
            );
            claim.sandbox.context("a claim has a sandbox")
        })
        .collect()
}

#[test]
fn ten_thousand_wrong_calls_are_answered_as_the_spec_says_and_touch_no_other_sandbox() {
    let node = Node::running().unwrap();
    let victim = node.sandbox(Spec::new("victim").ambient()).unwrap();
    let added = node
        .call(Call::add, &victim)
        .with_key("name", "othernet")
        .run()
        .unwrap();
    assert_eq!(added.code, 0, "{added:?}");
    let pod = node.sandbox(Spec::new("a").ambient()).unwrap();
    let (good, paths) = (good(&node, &pod), paths(&node, &victim, &pod));
    let before = State::of(&node, &[&victim]).unwrap();
    let seen = Seen::default();
    thread::scope(|scope| {
        let workers: Vec<_> = (0..WORKERS)
            .map(|number| {
                let (good, paths) = (good.clone(), paths.clone());
                let seen = &seen;
                scope.spawn(move || work(u8::try_from(number).unwrap(), good, paths, seen))
            })
            .collect();
        for worker in workers {
            worker.join().expect("a worker panicked").unwrap();
        }
    });
    let seen = seen.into_inner().unwrap();
    // Mutations that only break the JSON, or nothing, prove little.
    for code in [0, 1, 4, 6, 7, 11, 100] {
        assert!(
            seen.get(&code).is_some_and(|count| *count > 20),
            "few of {code}: {seen:?}"
        );
    }
    node.until_whole(&victim.spec).unwrap();
    end_what_is_left(&node, &pod).unwrap();
    // The rules end with the netns.
    pod.unmount().unwrap();
    before.unchanged(&node, &[&victim]).unwrap();
}

/// Sends DELs for every sandbox that a wrong call created in the one netns; then nothing may be left.
fn end_what_is_left(node: &Node, pod: &Pod) -> anyhow::Result<()> {
    eventually("what is left belongs to the netns", TIMEOUT, || {
        left(node, pod)
    })?;
    let records = fs::read_dir(node.run_dir().join("pod-events/pods"))?;
    for record in records {
        let record: Value = serde_json::from_slice(&fs::read(record?.path())?)?;
        let text = |key: &str| record.get(key).and_then(Value::as_str).unwrap_or_default();
        if text("network_name") == "othernet" {
            continue;
        }
        ensure!(
            text("netns_path") == pod.path().display().to_string(),
            "a record of another netns: {record}"
        );
        let call = node
            .call(Call::del, pod)
            .with_key("name", text("network_name"));
        let call = call.with_var("CNI_CONTAINERID", text("container_id"));
        let outcome = call.with_var("CNI_IFNAME", text("ifname")).run()?;
        ensure!(outcome.code == 0, "{outcome:?}");
    }
    // Calls with a wrong socket leave spool entries, which would be read later.
    fs::remove_dir_all(node.state_dir().join("spool")).unwrap_or_default();
    Ok(())
}
