//! Uninstalling from the node: by a ConfigMap's file and by hand.

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;

use crate::common::installer_host::{Host, PRIMARY};

const INCUMBENTS: &str = "{\"name\":\"k8s\",\"cniVersion\":\"0.3.1\",\"plugins\":[{\"type\":\"calico\"},\n {\"type\":\"istio-cni\",\"x\":[1]}]}";
const SINGLE: &str = "{\"type\":\"bridge\",\"name\":\"k8s\",\"cniVersion\":\"0.4.0\"}\n";

#[test]
fn uninstall_leaves_no_trace_tells_it_in_one_line_and_stays_away() {
    for (mode, name, text) in [
        ("owned", "10-a.conflist", PRIMARY),
        ("in-place", "10-a.conflist", PRIMARY),
        ("in-place", "10-a.conf", SINGLE),
        ("standalone", "10-a.conflist", PRIMARY),
    ] {
        let mode = format!("--mode={mode}");
        let mut host = Host::new(&[(name, text)]);
        let original = ["etc", "opt", "var"].map(|path| host.contents(path));
        host.start_ready(&[&mode]);
        fs::write(host.path("leave"), "uninstall\n").unwrap();
        assert_eq!(host.ended(), Some(0), "{}", host.log());
        let receipt = fs::read_to_string(host.path("receipt")).unwrap();
        assert!(
            receipt.starts_with("inpod left: uninstall; ") && receipt.lines().count() == 1,
            "{receipt}"
        );
        assert_eq!(
            ["etc", "opt", "var"].map(|path| host.contents(path)),
            original,
            "{mode}"
        );
        // The kubelet starts it again.
        fs::remove_file(host.path("receipt")).unwrap();
        host.start(&[&mode]);
        host.until_logged("inpod has left this node");
        assert!(!host.is_ready());
        assert_eq!(
            ["etc", "opt", "var"].map(|path| host.contents(path)),
            original,
            "{mode}"
        );
        // The ConfigMap is deleted while the release still runs.
        fs::remove_file(host.path("leave")).unwrap();
        // It reads the file every second.
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(3) {
            assert!(!host.is_ready(), "{}", host.log());
            thread::sleep(Duration::from_millis(100));
        }
        assert_eq!(
            ["etc", "opt", "var"].map(|path| host.contents(path)),
            original,
            "{mode}"
        );
        fs::write(host.path("leave"), "").unwrap();
        host.until_ready();
        assert!(!host.path("receipt").exists());
    }
}

#[test]
fn handover_gives_the_incumbents_entry_back_in_every_form() {
    let own = [
        ("02-istio-cni.conflist", INCUMBENTS),
        ("10-a.conflist", PRIMARY),
    ];
    for (mode, files) in [
        ("owned", &own[..]),
        ("in-place", &own),
        ("in-place", &[("10-a.conflist", INCUMBENTS)]),
        ("owned", &[("10-a.conflist", INCUMBENTS)]),
    ] {
        let mut host = Host::new(files);
        fs::write(host.path("opt/cni/bin/istio-cni"), "").unwrap();
        let original = host.contents("etc");
        host.start_ready(&[&format!("--mode={mode}")]);
        assert_ne!(host.contents("etc"), original);
        fs::write(host.path("leave"), "handover").unwrap();
        assert_eq!(host.ended(), Some(0), "{}", host.log());
        assert_eq!(host.contents("etc"), original, "{mode}");
        let receipt = fs::read_to_string(host.path("receipt")).unwrap();
        assert!(receipt.starts_with("inpod left: handover; "), "{receipt}");
    }
}

#[test]
fn handover_to_an_incumbent_whose_plugin_is_gone_leaves_no_entry_without_a_plugin() {
    let (own, primary) = ("02-istio-cni.conflist", "10-a.conflist");
    for (mode, files) in [
        ("owned", &[(own, INCUMBENTS), (primary, PRIMARY)][..]),
        ("in-place", &[(own, INCUMBENTS), (primary, PRIMARY)]),
        ("in-place", &[(primary, INCUMBENTS)]),
    ] {
        let mut host = Host::new(files);
        host.start_ready(&[&format!("--mode={mode}")]);
        fs::write(host.path("leave"), "handover").unwrap();
        assert_eq!(host.ended(), Some(0), "{}", host.log());
        assert_eq!(host.read(own), None, "{mode}");
        let left = host.read(primary).unwrap();
        assert!(left.contains("calico"), "{left}");
        assert!(
            !left.contains("istio-cni") && !left.contains("inpod"),
            "{left}"
        );
    }
}

#[test]
fn an_incumbent_whose_plugin_is_gone_does_not_come_back_on_uninstall() {
    for is_there in [false, true] {
        let mut host = Host::new(&[("10-a.conflist", INCUMBENTS)]);
        host.start_ready(&["--mode=in-place"]);
        host.stop(Signal::SIGTERM);
        if is_there {
            fs::write(host.path("opt/cni/bin/istio-cni"), "").unwrap();
        }
        assert!(host.run(&["uninstall", "--mode=in-place"]).status.success());
        let text = host.read("10-a.conflist").unwrap();
        assert_eq!(text.contains("istio-cni"), is_there, "{text}");
        assert!(
            is_there == (text == INCUMBENTS) && text.contains("calico"),
            "{text}"
        );
    }
}

#[test]
fn the_plugins_state_goes_when_no_namespace_is_enrolled_any_more() {
    let mut host = Host::new(&[("10-a.conflist", PRIMARY)]);
    host.start_ready(&[]);
    let state = host.path("var/lib/inpod/plugin");
    fs::create_dir_all(state.join("spool")).unwrap();
    fs::write(state.join("enrolled-namespaces"), "shop\n").unwrap();
    fs::write(host.path("leave"), "uninstall").unwrap();
    host.until("the plugin is gone", |host| !host.installed().exists());
    thread::sleep(Duration::from_millis(500));
    assert!(state.exists() && !host.path("receipt").exists());
    fs::write(state.join("enrolled-namespaces"), "").unwrap();
    assert_eq!(host.ended(), Some(0));
    assert!(!state.exists() && host.path("receipt").exists());
}

#[test]
fn keep_binary_keeps_the_plugin_for_runtimes_that_call_it_for_the_last_time_later() {
    let mut host = Host::new(&[("10-a.conflist", PRIMARY)]);
    host.start_ready(&[]);
    host.stop(Signal::SIGTERM);
    assert!(
        host.run(&["uninstall", "--keep-binary=true"])
            .status
            .success()
    );
    assert!(host.installed().exists() && host.read("02-inpod.conflist").is_none());
}

#[test]
fn by_hand_it_is_repeatable_and_refused_while_the_service_runs() {
    let mut host = Host::new(&[("10-a.conflist", PRIMARY)]);
    host.start_ready(&[]);
    let refused = host.run(&["uninstall"]);
    assert!(
        String::from_utf8_lossy(&refused.stderr).contains("another installer is at work"),
        "{refused:?}"
    );
    host.stop(Signal::SIGTERM);
    for _ in 0..2 {
        let left = host.run(&["uninstall"]);
        assert!(
            String::from_utf8_lossy(&left.stdout).starts_with("inpod left: uninstall; "),
            "{left:?}"
        );
    }
    assert_eq!(host.read("10-a.conflist").as_deref(), Some(PRIMARY));
}

#[test]
fn any_other_mode_means_stay_and_is_reported() {
    let mut host = Host::new(&[("10-a.conflist", PRIMARY)]);
    fs::write(host.path("leave"), "unistall").unwrap();
    host.start_ready(&[]);
    host.until_logged("expected uninstall, handover or nothing");
    assert!(host.read("02-inpod.conflist").is_some());
}

#[test]
fn the_kill_switch_is_set_and_taken_away_by_hand() {
    let host = Host::new(&[]);
    let switch = host.path("var/lib/inpod/plugin/disabled");
    for (word, is_set) in [
        ("disable", true),
        ("disable", true),
        ("enable", false),
        ("enable", false),
    ] {
        let done = host.run(&[word]);
        assert!(done.status.success(), "{done:?}");
        assert_eq!(switch.exists(), is_set);
    }
}
