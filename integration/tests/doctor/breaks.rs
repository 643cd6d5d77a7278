//! Prerequisites, broken one at a time.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::PoisonError,
};

use anyhow::ensure;
use integration::{PATIENCE, eventually, run};
use nix::sys::signal::Signal;

use crate::{CHAIN, MOUNTS, Patient, Verdicts, verdicts};

fn mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// Breaks something, sees what is said, mends it, and sees that all is as before.
fn breaks(
    patient: &Patient,
    before: &Verdicts,
    wanted: &[(&str, &str, &str)],
    breaks: impl FnOnce(),
    mend: impl FnOnce(),
) {
    breaks();
    patient.until_told(before, wanted);
    mend();
    patient.until_well(before);
}

/// It has no API server here, and is not ready.
#[test]
fn repair_is_looked_at_where_it_is_deployed() {
    let patient = Patient::new();
    let before = patient.verdicts();
    assert!(!before.keys().any(|(_, subject)| subject.contains("repair")));
    let kubeconfig = patient.node.run_dir().with_file_name("kubeconfig");
    let nowhere = "{apiVersion: v1, kind: Config, current-context: it, contexts: [{name: it, context: {cluster: it, user: it}}], \
                   clusters: [{name: it, cluster: {server: 'http://127.0.0.1:1'}}], users: [{name: it, user: {token: it}}]}";
    fs::write(&kubeconfig, nowhere).unwrap();
    let start = || {
        let settings = [
            "--peer",
            "uid",
            "--node-name",
            patient.node.name(),
            "--kubeconfig",
            kubeconfig.to_str().unwrap(),
        ];
        patient.node.start_with("repair", &settings).unwrap();
    };
    let told = [
        ("CONDITION_BAD", "repair/pods", "failed"),
        ("SERVICE_NOT_READY", "repair", "failed"),
    ];
    let stop = || patient.node.stop("repair", Signal::SIGTERM).unwrap();
    breaks(&patient, &before, &told, start, stop);
    let told = |code: &str| {
        let of_it = (code.to_owned(), "repair".to_owned());
        patient.verdicts().get(&of_it).cloned()
    };
    // One that ended took its socket with it, one that was killed did not.
    assert_eq!(told("SOCKET_MISSING").as_deref(), Some("unknown"));
    start();
    let socket = inpod_service::socket(&patient.node.run_dir(), "repair");
    eventually("it has a socket", PATIENCE, || {
        ensure!(socket.exists(), "not yet");
        anyhow::Ok(())
    })
    .unwrap();
    patient.node.stop("repair", Signal::SIGKILL).unwrap();
    assert_eq!(told("SERVICE_SILENT").as_deref(), Some("unknown"));
}

#[test]
fn the_chain() {
    let patient = Patient::new();
    let before = patient.verdicts();
    let file = |name: &str| patient.conf.join(name);
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
            &patient,
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
        &patient,
        &before,
        &missing,
        || fs::remove_file(&ours).unwrap(),
        || write(&ours, CHAIN),
    );
}

#[test]
fn the_plugin() {
    let patient = Patient::new();
    let before = patient.verdicts();
    let (plugin, aside) = (patient.bin.join("inpod-cni"), patient.bin.join("aside"));
    let missing = [("PLUGIN_MISSING", "", "failed")];
    breaks(
        &patient,
        &before,
        &missing,
        || fs::rename(&plugin, &aside).unwrap(),
        || fs::rename(&aside, &plugin).unwrap(),
    );
    let refused = [("PLUGIN_NOT_EXECUTABLE", "", "failed")];
    breaks(
        &patient,
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
    breaks(&patient, &before, &silent, shadow, || {
        fs::rename(&aside, &plugin).unwrap();
    });
}

#[test]
fn sockets_and_services() {
    let patient = Patient::new();
    let before = patient.verdicts();
    let node = &patient.node;
    let socket = inpod_service::socket(&node.run_dir(), "netconfig");
    let open = [("SOCKET_OPEN", "netconfig", "failed")];
    breaks(
        &patient,
        &before,
        &open,
        || mode(&socket, 0o666),
        || mode(&socket, 0o600),
    );
    let directory = socket.parent().unwrap();
    breaks(
        &patient,
        &before,
        &open,
        || mode(directory, 0o755),
        || mode(directory, 0o700),
    );
    // Its other callers are still connected.
    let aside = directory.join("aside");
    let missing = [("SOCKET_MISSING", "netconfig", "failed")];
    breaks(
        &patient,
        &before,
        &missing,
        || fs::rename(&socket, &aside).unwrap(),
        || fs::rename(&aside, &socket).unwrap(),
    );
    let silent = [("SERVICE_SILENT", "netconfig", "failed")];
    let kill = || node.stop("netconfig", Signal::SIGKILL).unwrap();
    breaks(&patient, &before, &silent, kill, || {
        node.start("netconfig").unwrap();
        node.ready().unwrap();
    });
    let hangs = || node.signal("ztunnel-broker", Signal::SIGSTOP).unwrap();
    let silent = [("SERVICE_SILENT", "ztunnel-broker", "failed")];
    breaks(&patient, &before, &silent, hangs, || {
        node.signal("ztunnel-broker", Signal::SIGCONT).unwrap();
        node.ready().unwrap();
    });
    let absent = [("ZTUNNEL_ABSENT", "", "failed")];
    let stop = || node.stop("ztunnel", Signal::SIGKILL).unwrap();
    breaks(&patient, &before, &absent, stop, || {
        node.start_ztunnel(&[]).unwrap();
        node.ready().unwrap();
    });
}

#[test]
fn a_service_of_another_release() {
    let patient = Patient::new();
    let before = patient.verdicts();
    let start = || patient.node.start("skewed-installer").unwrap();
    let far = [("VERSIONS_TOO_FAR", "", "failed")];
    breaks(&patient, &before, &far, start, || {
        patient
            .node
            .stop("skewed-installer", Signal::SIGTERM)
            .unwrap();
        fs::remove_dir_all(patient.node.run_dir().join("installer")).unwrap();
    });
}

#[test]
fn settings_of_the_kernel() {
    let patient = Patient::new();
    let before = patient.verdicts();
    let netns = format!("--net={}", patient.node.netns().path().display());
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
        &patient,
        &before,
        &strict,
        || set("net.ipv4.conf.all.rp_filter=1"),
        || set(&back),
    );
    let disabled = [("IPV6_DISABLED", "", "warning")];
    breaks(
        &patient,
        &before,
        &disabled,
        || set("net.ipv6.conf.default.disable_ipv6=1"),
        || set("net.ipv6.conf.default.disable_ipv6=0"),
    );
}

#[test]
fn what_the_plugin_leaves_and_reads() {
    let patient = Patient::new();
    let before = patient.verdicts();
    let state = patient.node.state_dir();
    let switch = state.join("disabled");
    let set = [("KILL_SWITCH", "", "failed")];
    breaks(
        &patient,
        &before,
        &set,
        || fs::write(&switch, "").unwrap(),
        || fs::remove_file(&switch).unwrap(),
    );
    let subject = state.display().to_string();
    let open = [("STATE_OPEN", subject.as_str(), "failed")];
    breaks(
        &patient,
        &before,
        &open,
        || mode(&state, 0o755),
        || mode(&state, 0o700),
    );
    // Of a schema that pod-events does not read: it skips them and leaves them.
    let spool = state.join("spool");
    let entry = |number: u32| spool.join(format!("{number:016}-1-add.json"));
    let put = |numbers: std::ops::Range<u32>| {
        fs::create_dir_all(&spool).unwrap();
        numbers.for_each(|number| fs::write(entry(number), r#"{"schema":999}"#).unwrap());
    };
    put(0..1);
    patient.until_told(&before, &[("SPOOL_WAITING", "", "warning")]);
    put(1..20_000);
    patient.until_told(&before, &[("SPOOL_FULL", "", "failed")]);
    fs::remove_dir_all(&spool).unwrap();
    patient.until_well(&before);
}

#[test]
fn netns_that_are_not_passed_on() {
    let patient = Patient::new();
    patient
        .node
        .pod(integration::Spec::new("web").ambient())
        .unwrap();
    let before = patient.verdicts();
    // A node whose netconfig sees another directory than the runtime mounts in.
    patient.node.stop("netconfig", Signal::SIGTERM).unwrap();
    patient.node.start_netconfig_blind().unwrap();
    let report = eventually("netconfig is blind", PATIENCE, || {
        let report = patient.report(&[]);
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
    let patient = Patient::new();
    let before = patient.verdicts();
    let _alone = MOUNTS.write().unwrap_or_else(PoisonError::into_inner);
    run("mount", &["--make-private", "/run/netns"]).unwrap();
    let key = ("NETNS_NOT_SHARED".to_owned(), String::new());
    // Nodes of other tests come and go beside this one.
    let told = eventually("that alone is told", PATIENCE, || {
        let now = verdicts(&patient.look(&[]));
        let is_new = |(key, verdict): &(&_, &_)| before.get(*key) != Some(*verdict);
        let changed: Vec<_> = now.iter().filter(is_new).collect();
        anyhow::ensure!(changed == [(&key, &"failed".to_owned())], "{changed:?}");
        anyhow::Ok(())
    });
    run("mount", &["--make-shared", "/run/netns"]).unwrap();
    told.unwrap();
    eventually("all is as before", PATIENCE, || {
        let now = verdicts(&patient.look(&[]));
        anyhow::ensure!(now == before, "{now:?}");
        anyhow::Ok(())
    })
    .unwrap();
}
