//! Prerequisites, broken one at a time.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use anyhow::ensure;
use integration::{TIMEOUT, eventually, run};
use nix::sys::signal::Signal;

use crate::alone::doctor::{CHAIN, Host, Verdicts, verdicts};

fn mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// Breaks, expects a verdict, repairs, and expects the verdicts of before.
fn breaks(
    host: &Host,
    before: &Verdicts,
    wanted: &[(&str, &str, &str)],
    breaks: impl FnOnce(),
    mend: impl FnOnce(),
) {
    breaks();
    host.until_verdicts(before, wanted);
    mend();
    host.until_healthy(before);
}

/// Without an API server it is not ready.
#[test]
fn repair_is_checked_where_it_is_deployed() {
    let host = Host::new();
    let before = host.verdicts();
    assert!(!before.keys().any(|(_, subject)| subject.contains("repair")));
    let kubeconfig = host.node.run_dir().with_file_name("kubeconfig");
    let nowhere = "{apiVersion: v1, kind: Config, current-context: it, contexts: [{name: it, context: {cluster: it, user: it}}], \
                   clusters: [{name: it, cluster: {server: 'http://127.0.0.1:1'}}], users: [{name: it, user: {token: it}}]}";
    fs::write(&kubeconfig, nowhere).unwrap();
    let start = || {
        let settings = [
            "--peer",
            "uid",
            "--node-name",
            host.node.name(),
            "--kubeconfig",
            kubeconfig.to_str().unwrap(),
        ];
        host.node.start_with("repair", &settings).unwrap();
    };
    let reported = [
        ("CONDITION_BAD", "repair/pods", "failed"),
        ("SERVICE_NOT_READY", "repair", "failed"),
    ];
    let stop = || host.node.stop("repair", Signal::SIGTERM).unwrap();
    breaks(&host, &before, &reported, start, stop);
    let reported = |code: &str| {
        let of_it = (code.to_owned(), "repair".to_owned());
        host.verdicts().get(&of_it).cloned()
    };
    // A stopped service removes its socket, a killed one does not.
    assert_eq!(reported("SOCKET_MISSING").as_deref(), Some("unknown"));
    start();
    let socket = inpod_service::socket(&host.node.run_dir(), "repair");
    eventually("it has a socket", TIMEOUT, || {
        ensure!(socket.exists(), "not yet");
        anyhow::Ok(())
    })
    .unwrap();
    host.node.stop("repair", Signal::SIGKILL).unwrap();
    assert_eq!(reported("SERVICE_SILENT").as_deref(), Some("unknown"));
}

#[test]
fn the_chain() {
    let host = Host::new();
    let before = host.verdicts();
    let file = |name: &str| host.conf.join(name);
    let ours = file("10-podnet.conflist");
    let write = |path: &PathBuf, text: &str| fs::write(path, text).unwrap();
    let without = CHAIN.replace(r#",{"type":"inpod-cni"}"#, "");
    let second = CHAIN.replace("bridge", "istio-cni");
    let earlier = file("05-other.conflist");
    for (code, verdict, path, text) in [
        ("CHAIN_WITHOUT_INPOD", "failed", &ours, without.as_str()),
        ("CHAIN_SECOND_AGENT", "failed", &ours, second.as_str()),
        ("CHAIN_SHADOWED", "failed", &earlier, without.as_str()),
        ("CHAIN_FILE_INVALID", "failed", &earlier, "{"),
        (
            "CHAIN_EXCLUSIVE",
            "warning",
            &file("20-x.conflist.cilium_bak"),
            CHAIN,
        ),
    ] {
        breaks(
            &host,
            &before,
            &[(code, "", verdict)],
            || write(path, text),
            || {
                if *path == ours {
                    write(path, CHAIN);
                } else {
                    fs::remove_file(path).unwrap();
                }
            },
        );
    }
    let missing = [("CHAIN_MISSING", "", "failed")];
    breaks(
        &host,
        &before,
        &missing,
        || fs::remove_file(&ours).unwrap(),
        || write(&ours, CHAIN),
    );
}

#[test]
fn the_plugin() {
    let host = Host::new();
    let before = host.verdicts();
    let (plugin, aside) = (host.bin.join("inpod-cni"), host.bin.join("aside"));
    let missing = [("PLUGIN_MISSING", "", "failed")];
    breaks(
        &host,
        &before,
        &missing,
        || fs::rename(&plugin, &aside).unwrap(),
        || fs::rename(&aside, &plugin).unwrap(),
    );
    let refused = [("PLUGIN_NOT_EXECUTABLE", "", "failed")];
    breaks(
        &host,
        &before,
        &refused,
        || mode(&plugin, 0o644),
        || mode(&plugin, 0o755),
    );
    let silent = [("PLUGIN_SILENT", "", "failed")];
    let shadow = || {
        fs::rename(&plugin, &aside).unwrap();
        fs::write(&plugin, "#!/bin/sh\nexit 3\n").unwrap();
        mode(&plugin, 0o755);
    };
    breaks(&host, &before, &silent, shadow, || {
        fs::rename(&aside, &plugin).unwrap();
    });
}

#[test]
fn sockets_and_services() {
    let host = Host::new();
    let before = host.verdicts();
    let node = &host.node;
    let socket = inpod_service::socket(&node.run_dir(), "netconfig");
    let open = [("SOCKET_OPEN", "netconfig", "failed")];
    breaks(
        &host,
        &before,
        &open,
        || mode(&socket, 0o666),
        || mode(&socket, 0o600),
    );
    let directory = socket.parent().unwrap();
    breaks(
        &host,
        &before,
        &open,
        || mode(directory, 0o755),
        || mode(directory, 0o700),
    );
    // Its other callers are still connected.
    let aside = directory.join("aside");
    let missing = [("SOCKET_MISSING", "netconfig", "failed")];
    breaks(
        &host,
        &before,
        &missing,
        || fs::rename(&socket, &aside).unwrap(),
        || fs::rename(&aside, &socket).unwrap(),
    );
    let silent = [("SERVICE_SILENT", "netconfig", "failed")];
    let kill = || node.stop("netconfig", Signal::SIGKILL).unwrap();
    breaks(&host, &before, &silent, kill, || {
        node.start("netconfig").unwrap();
        node.ready().unwrap();
    });
    let hangs = || node.signal("ztunnel-broker", Signal::SIGSTOP).unwrap();
    let silent = [("SERVICE_SILENT", "ztunnel-broker", "failed")];
    breaks(&host, &before, &silent, hangs, || {
        node.signal("ztunnel-broker", Signal::SIGCONT).unwrap();
        node.ready().unwrap();
    });
    let absent = [("ZTUNNEL_ABSENT", "", "failed")];
    let stop = || node.stop("ztunnel", Signal::SIGKILL).unwrap();
    breaks(&host, &before, &absent, stop, || {
        node.start_ztunnel(&[]).unwrap();
        node.ready().unwrap();
    });
}

#[test]
fn a_service_of_another_release() {
    let host = Host::new();
    let before = host.verdicts();
    let start = || host.node.start("skewed-installer").unwrap();
    let far = [("VERSIONS_TOO_FAR", "", "failed")];
    breaks(&host, &before, &far, start, || {
        host.node.stop("skewed-installer", Signal::SIGTERM).unwrap();
        fs::remove_dir_all(host.node.run_dir().join("installer")).unwrap();
    });
}

#[test]
fn settings_of_the_kernel() {
    let host = Host::new();
    let before = host.verdicts();
    let netns = format!("--net={}", host.node.netns().path().display());
    let set =
        |setting: &str| drop(run("nsenter", &[&netns, "sysctl", "-q", "-w", setting]).unwrap());
    let strict = [("RP_FILTER_STRICT", "", "warning")];
    let was = run(
        "nsenter",
        &[&netns, "sysctl", "-n", "net.ipv4.conf.all.rp_filter"],
    )
    .unwrap();
    let back = format!("net.ipv4.conf.all.rp_filter={}", was.trim());
    breaks(
        &host,
        &before,
        &strict,
        || set("net.ipv4.conf.all.rp_filter=1"),
        || set(&back),
    );
    let disabled = [("IPV6_DISABLED", "", "warning")];
    breaks(
        &host,
        &before,
        &disabled,
        || set("net.ipv6.conf.default.disable_ipv6=1"),
        || set("net.ipv6.conf.default.disable_ipv6=0"),
    );
}

#[test]
fn what_the_plugin_leaves_and_reads() {
    let host = Host::new();
    let before = host.verdicts();
    let state = host.node.state_dir();
    let switch = state.join("disabled");
    let set = [
        ("CONDITION_BAD", "pod-events/kill-switch", "failed"),
        ("KILL_SWITCH", "", "failed"),
    ];
    breaks(
        &host,
        &before,
        &set,
        || fs::write(&switch, "").unwrap(),
        || fs::remove_file(&switch).unwrap(),
    );
    let subject = state.display().to_string();
    let open = [("STATE_OPEN", subject.as_str(), "failed")];
    breaks(
        &host,
        &before,
        &open,
        || mode(&state, 0o755),
        || mode(&state, 0o700),
    );
    // pod-events skips and keeps entries with a schema that it does not know.
    let spool = state.join("spool");
    let entry = |number: u32| spool.join(format!("{number:016}-1-add.json"));
    let put = |numbers: std::ops::Range<u32>| {
        fs::create_dir_all(&spool).unwrap();
        numbers.for_each(|number| fs::write(entry(number), r#"{"schema":999}"#).unwrap());
    };
    put(0..1);
    host.until_verdicts(&before, &[("SPOOL_WAITING", "", "warning")]);
    put(1..20_000);
    host.until_verdicts(&before, &[("SPOOL_FULL", "", "failed")]);
    fs::remove_dir_all(&spool).unwrap();
    host.until_healthy(&before);
}

#[test]
fn netns_that_are_not_passed_on() {
    let host = Host::new();
    host.node
        .pod(integration::Spec::new("web").ambient())
        .unwrap();
    let before = host.verdicts();
    // netconfig sees another directory than the runtime's mounts.
    host.node.stop("netconfig", Signal::SIGTERM).unwrap();
    host.node.start_netconfig_blind().unwrap();
    // It has copied the mounts that were there when it started: a later one is missing.
    eventually("netconfig serves", TIMEOUT, || host.node.api().claims()).unwrap();
    let _late = host.node.sandbox(integration::Spec::new("late")).unwrap();
    let report = eventually("netconfig is blind", TIMEOUT, || {
        let report = host.report(&[]);
        let found = verdicts(&report);
        let key = ("NETNS_NOT_SEEN".to_owned(), String::new());
        anyhow::ensure!(
            found.get(&key).is_some_and(|it| it == "failed"),
            "{report:#}"
        );
        anyhow::Ok(found)
    })
    .unwrap();
    let key = ("NETNS_NOT_SHARED".to_owned(), String::new());
    assert_eq!(report.get(&key), before.get(&key));
}

#[test]
fn a_directory_of_netns_that_is_private() {
    let host = Host::new();
    let before = host.verdicts();
    run("mount", &["--make-private", "/run/netns"]).unwrap();
    let key = ("NETNS_NOT_SHARED".to_owned(), String::new());
    let reported = eventually("that alone is reported", TIMEOUT, || {
        let now = verdicts(&host.report(&[]));
        let is_new = |(key, verdict): &(&_, &_)| before.get(*key) != Some(*verdict);
        let changed: Vec<_> = now.iter().filter(is_new).collect();
        anyhow::ensure!(changed == [(&key, &"failed".to_owned())], "{changed:?}");
        anyhow::Ok(())
    });
    run("mount", &["--make-shared", "/run/netns"]).unwrap();
    reported.unwrap();
    eventually("all is as before", TIMEOUT, || {
        let now = verdicts(&host.report(&[]));
        anyhow::ensure!(now == before, "{now:?}");
        anyhow::Ok(())
    })
    .unwrap();
}
