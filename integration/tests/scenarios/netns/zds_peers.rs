//! ZDS serves a ztunnel of a ztunnel's pod and refuses impostors.

use std::{
    fs,
    os::unix::{fs::PermissionsExt as _, net::UnixStream},
    process::{Child, Command},
    time::Instant,
};

use crate::common::ztunnel_pod::{Impostor, OTHER, Scene, ZTUNNEL};
use anyhow::ensure;
use integration::{Node, SERVICES, Spec, TIMEOUT, ZTUNNEL_CAPABILITIES, eventually};
use nix::sys::{
    signal::Signal,
    socket::{getsockopt, sockopt::PeerPidfd},
};

// scenario: 68
#[test]
fn a_ztunnel_of_its_pod_is_served_and_each_netns_is_audited() {
    let scene = Scene::new().unwrap();
    scene.write_ztunnel_manifest().unwrap();
    scene.start_ztunnel("ztunnel").unwrap();
    scene.node.ready().unwrap();
    let pod = scene.node.pod(Spec::new("a").ambient()).unwrap();
    scene.node.until_whole(&pod.spec).unwrap();

    let pid = scene.node.pid("ztunnel").unwrap();
    let sessions = scene.node.api().workloads().unwrap().sessions;
    let session = sessions.first().unwrap();
    assert_eq!(session.pod_uid, ZTUNNEL);
    assert_eq!(session.peer_pid, i32::try_from(pid).unwrap());
    assert!(session.cgroup.contains(&format!("/pod{ZTUNNEL}/cccc")));
    let log = scene.node.tail("ztunnel-broker", 1000);
    for what in ["ztunnel connected", "audit: Gave a netns to ztunnel"] {
        let reported = |line: &&str| {
            line.contains(what)
                && line.contains(&format!("peer.pid={pid} "))
                && line.contains(&format!("/pod{ZTUNNEL}/cccc"))
                && line.contains(&format!("peer.pod.uid=\"{ZTUNNEL}\""))
        };
        assert_eq!(log.lines().filter(reported).count(), 1, "{what}: {log}");
    }
    assert!(scene.refusals().is_empty(), "{:?}", scene.refusals());
}

#[test]
fn a_ztunnel_that_connects_before_anybody_said_so_is_held_and_served_then() {
    let scene = Scene::without_services().unwrap();
    scene.start("ztunnel-broker").unwrap();
    let broker = || scene.node.api().workloads();
    eventually("the broker serves", TIMEOUT, broker).unwrap();
    scene.start_ztunnel("ztunnel").unwrap();
    eventually("it is held", TIMEOUT, || {
        let log = scene.node.tail("ztunnel-broker", 1000);
        ensure!(log.contains("Holding a connection to ZDS"), "{log}");
        Ok(())
    })
    .unwrap();
    assert!(broker().unwrap().sessions.is_empty());
    for service in SERVICES.iter().filter(|name| **name != "ztunnel-broker") {
        scene.start(service).unwrap();
    }
    eventually("the broker knows no ztunnel", TIMEOUT, || {
        let log = scene.node.tail("pod-events", 1000);
        ensure!(
            log.contains("Updated the list of ztunnel pods at the broker"),
            "{log}"
        );
        Ok(())
    })
    .unwrap();
    assert!(broker().unwrap().sessions.is_empty());
    scene.write_ztunnel_manifest().unwrap();
    scene.node.ready().unwrap();
    // Neither refused nor reconnected.
    assert!(scene.refusals().is_empty(), "{:?}", scene.refusals());
}

fn assert_logged(scene: &Scene, words: &[&str]) {
    let lines = scene.refusals();
    let named = |line: &&String| words.iter().all(|word| line.contains(word));
    assert_eq!(
        lines.iter().filter(named).count(),
        1,
        "{words:?}: {lines:?}"
    );
}

// scenario: 68
#[test]
fn root_processes_that_are_no_ztunnel_are_given_nothing_and_are_written_down() {
    let scene = Scene::served().unwrap();
    let container = |uid, below, capabilities| {
        let within = scene.cgroups.container(uid, below, capabilities);
        within.unwrap()
    };
    let nested = format!("kubepods/pod{ZTUNNEL}/{}", "c".repeat(64));
    let of_other = format!("/pod{OTHER}/");
    let cases = [
        (Vec::new(), "is in no pod's container", ""),
        // A container's own cgroups, named like the ztunnel's.
        (
            container(OTHER, &nested, ZTUNNEL_CAPABILITIES),
            "is in no pod's container",
            nested.as_str(),
        ),
        // Perhaps a ztunnel whose pod is not known yet: refused after a while.
        (
            container(OTHER, "", ZTUNNEL_CAPABILITIES),
            "is in a pod that is not a ztunnel of this node",
            of_other.as_str(),
        ),
    ];
    for (within, why, place) in cases {
        // One place is logged at most every ten seconds.
        let deadline = Instant::now() + TIMEOUT;
        let impostor = loop {
            let impostor = scene.impostor(&within, &["wait"]).unwrap();
            impostor.assert_refused().unwrap();
            let pid = format!("process {} ", impostor.pid());
            if scene.refusals().iter().any(|line| line.contains(&pid)) {
                break impostor;
            }
            assert!(Instant::now() < deadline, "{:?}", scene.refusals());
        };
        let pid = format!("process {} in ", impostor.pid());
        assert_logged(&scene, &[&pid, why, place]);
    }
    let sessions = scene.node.api().workloads().unwrap().sessions;
    assert_eq!(sessions.len(), 1, "{sessions:?}");
}

// scenario: 68
#[test]
fn another_user_is_given_nothing_whatever_its_cgroup() {
    let scene = Scene::served().unwrap();
    let user = ["--reuid=65534", "--regid=65534", "--clear-groups"];
    let mut within = scene
        .cgroups
        .container(ZTUNNEL, "", ZTUNNEL_CAPABILITIES)
        .unwrap();
    // It loses other capabilities with the change of user in the cgroup.
    let script = within.get_mut(2).unwrap();
    *script = script.replace(" \"$@\"", &format!(" setpriv {} \"$@\"", user.join(" ")));
    *script = script.replace(ZTUNNEL_CAPABILITIES, "+all");
    let socket = scene.node.zds_socket();
    let directory = socket.parent().unwrap();
    let mode = |path: &std::path::Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(directory), mode(&socket)), (0o700, 0o600));
    // Even if they were open by mistake.
    fs::set_permissions(directory, fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).unwrap();
    let impostor = scene.impostor(&within, &["wait"]).unwrap();
    impostor.assert_refused().unwrap();
    let line = format!("process {} has uid 65534", impostor.pid());
    assert_logged(&scene, &[&line]);
}

/// Starts a process with a given pid, as could happen by chance.
fn under_pid(pid: u32, command: &[String]) -> anyhow::Result<Child> {
    let (program, arguments) = command.split_first().unwrap();
    eventually("a process has the pid", TIMEOUT, || {
        fs::write("/proc/sys/kernel/ns_last_pid", (pid - 1).to_string())?;
        let mut child = Command::new(program).args(arguments).spawn()?;
        if child.id() != pid {
            child.kill()?;
            child.wait()?;
        }
        ensure!(child.id() == pid, "it has {}", child.id());
        Ok(child)
    })
}

/// A pidfd of a socket's peer (Linux 6.5) is proof that no other process can obtain.
fn has_peer_pidfds() -> bool {
    let (one, _other) = UnixStream::pair().unwrap();
    !matches!(getsockopt(&one, PeerPidfd), Err(nix::Error::ENOPROTOOPT))
}

/// Before Linux 6.5 it looks like the ztunnel (services/docs/architecture.md).
#[test]
fn a_connection_whose_pid_is_by_now_a_ztunnels_is_given_nothing() {
    let scene = Scene::served().unwrap();
    // The broker accepts only after the process is gone.
    scene
        .node
        .signal("ztunnel-broker", Signal::SIGSTOP)
        .unwrap();
    let mut impostor: Impostor = scene.impostor(&[], &["hand-over"]).unwrap();
    impostor.ended().unwrap();
    let pid = impostor.pid();
    let mut real = scene
        .cgroups
        .container(ZTUNNEL, "", ZTUNNEL_CAPABILITIES)
        .unwrap();
    real.extend(["sleep".to_owned(), "60".to_owned()]);
    let mut real = under_pid(pid, &real).unwrap();
    eventually("it looks like a ztunnel", TIMEOUT, || {
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let cgroup = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
        ensure!(status.contains("CapPrm:\t0000000000203000"), "{status}");
        ensure!(cgroup.contains(ZTUNNEL), "{cgroup}");
        Ok(())
    })
    .unwrap();
    scene
        .node
        .signal("ztunnel-broker", Signal::SIGCONT)
        .unwrap();
    if has_peer_pidfds() {
        impostor.assert_refused().unwrap();
        let line = format!("cannot inspect process {pid}: the peer's process is not visible");
        assert_logged(&scene, &[&line]);
    } else {
        impostor.until_given_something().unwrap();
    }
    real.kill().unwrap();
    real.wait().unwrap();
}

#[test]
fn a_connection_made_before_the_ztunnels_is_held_for_a_while_and_given_nothing() {
    let scene = Scene::without_services().unwrap();
    scene.start("ztunnel-broker").unwrap();
    eventually("the broker serves", TIMEOUT, || {
        scene.node.api().workloads()
    })
    .unwrap();
    let within = scene.cgroups.container(OTHER, "", ZTUNNEL_CAPABILITIES);
    let impostor = scene.impostor(&within.unwrap(), &["wait"]).unwrap();
    for service in SERVICES.iter().filter(|name| **name != "ztunnel-broker") {
        scene.start(service).unwrap();
    }
    scene.write_ztunnel_manifest().unwrap();
    scene.start_ztunnel("ztunnel").unwrap();
    scene.node.ready().unwrap();
    assert_eq!(impostor.said(), "connected\n", "it is still held");
    scene.node.pod(Spec::new("victim").ambient()).unwrap();
    impostor.assert_refused().unwrap();
    let pid = format!("process {} ", impostor.pid());
    assert_logged(&scene, &[&pid, OTHER]);
}

#[test]
fn a_broker_that_cannot_see_pids_does_not_start_and_says_what_to_do() {
    let node = Node::new().unwrap();
    let program = integration::bin("ztunnel-broker").unwrap();
    let start = |peer: &str| {
        let output = Command::new("timeout")
            .args([
                "5",
                "unshare",
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
            ])
            .arg(&program)
            .args(["--peer", "uid", "--ztunnel-peer", peer, "--run-dir"])
            .arg(node.run_dir())
            .arg("--zds-socket")
            .arg(node.zds_socket())
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .output()
            .unwrap();
        (
            output.status.code(),
            String::from_utf8(output.stderr).unwrap(),
        )
    };
    for peer in ["pod", "cgroup:/"] {
        let (code, words) = start(peer);
        assert_eq!(code, Some(1), "{words}");
        assert!(
            words.contains("hostPID") && words.contains("ztunnel_peer = uid"),
            "{words}"
        );
        assert!(!node.zds_socket().exists());
    }
    let (code, words) = start("uid");
    assert_eq!(code, Some(124), "it serves: {words}");
}
