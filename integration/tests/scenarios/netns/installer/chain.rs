//! Joining the chain and following the primary in every mode.

use std::{os::unix::fs::symlink, path::Path, thread, time::Duration};

use integration::{guard, run};
use nix::{
    sys::{signal::Signal, stat::Mode},
    unistd::mkfifo,
};

use crate::{
    common::installer_host::{Host, PRIMARY},
    netns::installer::reader::{Reader, types},
};

const SINGLE: &str = "{\"type\":\"bridge\",\"name\":\"k8s\",\"cniVersion\":\"0.4.0\"}\n";
const OWNED: &str = "02-inpod.conflist";

fn has_us(host: &Host, name: &str) -> bool {
    let types = host.read(name).and_then(|text| types(text.as_bytes()));
    types.is_some_and(|types| types.last().is_some_and(|kind| kind == "inpod-cni"))
}

// scenario: 4
#[test]
fn it_is_ready_when_the_plugin_and_the_chain_are_in_place_and_stopping_changes_nothing() {
    let mut host = Host::new(&[("10-calico.conflist", PRIMARY)]);
    host.start_ready(&[]);
    assert!(has_us(&host, OWNED) && host.installed().exists());
    assert_eq!(host.read("10-calico.conflist").as_deref(), Some(PRIMARY));
    assert_eq!(
        host.metric("inpod_installer_rewrites_total{cause=\"first\"}"),
        Some(1.0)
    );
    let before = ["etc", "opt", "var"].map(|path| host.tree(path));
    assert_eq!(host.stop(Signal::SIGTERM), Some(0));
    assert_eq!(["etc", "opt", "var"].map(|path| host.tree(path)), before);
    host.start_ready(&[]);
    assert_eq!(
        ["etc", "opt", "var"].map(|path| host.tree(path)),
        before,
        "a restart writes nothing"
    );
}

#[test]
fn without_a_primary_it_waits_and_is_in_the_chain_as_soon_as_there_is_one() {
    let mut host = Host::new(&[]);
    host.start(&[]);
    host.until_logged("waiting for the primary CNI");
    assert!(!host.is_ready() && host.installed().exists());
    host.put("10-calico.conflist", PRIMARY);
    host.until("inpod is in the chain", |host| has_us(host, OWNED));
    host.until_ready();
}

#[test]
fn every_change_of_the_primary_is_followed_and_a_runtime_never_sees_a_chain_without_inpod() {
    let mut host = Host::new(&[("10-calico.conflist", PRIMARY)]);
    host.start_ready(&[]);
    let reader = Reader::of(host.conf_dir());
    for (from, to) in [
        ("\"snat\": true", "\"snat\": false"),
        ("1e40", "18446744073709551617"),
        ("1.0.0", "1.1.0"),
    ] {
        let changed = PRIMARY.replace(from, to);
        host.put("10-calico.conflist", &changed);
        host.until(to, |host| {
            host.read(OWNED).is_some_and(|text| text.contains(to))
        });
        let copy = host.read(OWNED).unwrap();
        let plugins = changed.lines().filter(|line| line.contains("\"type\""));
        for plugin in plugins {
            assert!(copy.contains(plugin.trim().trim_end_matches(',')), "{copy}");
        }
    }
    let seen = reader.stop();
    assert!(
        seen.reads > 20 && seen.broken.is_empty() && seen.without_us.is_empty(),
        "{seen:?}"
    );
}

// scenario: 4
#[test]
fn what_is_taken_away_is_put_back_and_what_does_not_matter_changes_nothing() {
    let mut host = Host::new(&[("10-calico.conflist", PRIMARY)]);
    host.start_ready(&["--sweep-seconds=600"]);
    std::fs::remove_file(host.conf_dir().join(OWNED)).unwrap();
    host.until("the file is back", |host| has_us(host, OWNED));
    std::fs::remove_file(host.installed()).unwrap();
    host.until("the plugin is back", |host| host.installed().exists());
    host.until_ready();
    let before = host.tree("etc").remove(&host.conf_dir().join(OWNED));
    for number in 0..20 {
        host.put(
            "99-other.conflist",
            &PRIMARY.replace("1.0.0", &format!("1.0.{number}")),
        );
        host.put("kubeconfig", "changed");
        assert!(host.is_ready(), "an unrelated change makes it not ready");
    }
    assert_eq!(
        host.tree("etc").remove(&host.conf_dir().join(OWNED)),
        before
    );
}

#[test]
fn in_place_a_list_is_edited_and_a_single_configuration_becomes_one() {
    for (name, text) in [("10-a.conflist", PRIMARY), ("10-a.conf", SINGLE)] {
        let mut host = Host::new(&[(name, text)]);
        let reader = Reader::of(host.conf_dir());
        host.start_ready(&["--mode=in-place"]);
        assert!(has_us(&host, "10-a.conflist"));
        host.put("05-b.conflist", PRIMARY);
        host.until("inpod follows the file that comes first", |host| {
            has_us(host, "05-b.conflist")
        });
        thread::sleep(Duration::from_millis(100));
        let seen = reader.stop();
        assert!(seen.broken.is_empty(), "{seen:?}");
    }
}

#[test]
fn standalone_and_owned_work_with_a_single_configuration() {
    for (mode, file) in [("owned", OWNED), ("standalone", "inpod.conflist")] {
        let mut host = Host::new(&[("10-a.conf", SINGLE)]);
        host.start_ready(&[&format!("--mode={mode}")]);
        assert!(has_us(&host, file), "{mode}");
        assert_eq!(host.read("10-a.conf").as_deref(), Some(SINGLE));
    }
}

#[test]
fn a_name_that_would_not_be_taken_is_refused_with_the_setting_that_corrects_it() {
    let mut host = Host::new(&[("00-net.conf", SINGLE)]);
    host.start(&[]);
    host.until_logged("set owned_file to a name that does");
    assert!(!host.is_ready() && host.read(OWNED).is_none());
}

#[test]
fn the_directories_are_read_from_the_runtimes_configuration() {
    let mut host = Host::new(&[]);
    let k3s = "[plugins.\"io.containerd.grpc.v1.cri\".cni]\nbin_dir = \"/k3s/bin\"\nconf_dir = \"/k3s/net.d\"\n";
    for dir in [
        "k3s/bin",
        "k3s/net.d",
        "var/lib/rancher/k3s/agent/etc/containerd",
    ] {
        std::fs::create_dir_all(host.path(dir)).unwrap();
    }
    std::fs::write(
        host.path("var/lib/rancher/k3s/agent/etc/containerd/config.toml"),
        k3s,
    )
    .unwrap();
    crate::common::installer_host::put(&host.path("k3s/net.d"), "10-flannel.conflist", PRIMARY);
    host.start_ready(&[]);
    assert!(
        host.path("k3s/net.d/02-inpod.conflist").exists()
            && host.path("k3s/bin/inpod-cni").exists()
    );
    assert!(!host.installed().exists());
}

#[test]
fn a_primary_that_is_written_in_place_never_moves_the_node_to_another_network() {
    let other = PRIMARY.replace("calico", "bridge");
    let mut host = Host::new(&[
        ("10-calico.conflist", PRIMARY),
        ("87-podman.conflist", &other),
    ]);
    host.start_ready(&["--sweep-seconds=1"]);
    let copy = host.read(OWNED);
    for broken in ["", &PRIMARY[..60], &PRIMARY.replace("true }", "true, }")] {
        host.put("10-calico.conflist", broken);
        host.until_logged("10-calico.conflist is invalid");
        host.until("the installer is not ready", |host| !host.is_ready());
        assert_eq!(host.read(OWNED), copy);
        let said = String::from_utf8(host.run(&["--check"]).stderr).unwrap();
        assert!(said.contains("10-calico.conflist is invalid"), "{said}");
        host.put("10-calico.conflist", PRIMARY);
        host.until_ready();
    }
    assert_eq!(host.read(OWNED), copy);
    // The other network is joined when the primary is gone, as runtimes then use it.
    std::fs::remove_file(host.conf_dir().join("10-calico.conflist")).unwrap();
    host.until("the other network is joined", |host| {
        host.read(OWNED).is_some_and(|text| text.contains("bridge"))
    });
}

#[test]
fn a_directory_that_a_reboot_empties_is_reported_and_does_not_affect_readiness() {
    guard().unwrap();
    let reboot = "inpod_installer_condition{name=\"reboot\"}";
    let overlay = "lowerdir=LOWER,upperdir=UPPER/upper,workdir=UPPER/work";
    for options in [None, Some("size=1m"), Some(overlay)] {
        let mut host = Host::new(&[]);
        let dir = host.conf_dir().display().to_string();
        let [lower, upper] = ["lower", "upper"].map(|name| host.path(name));
        if options == Some(overlay) {
            for path in [&lower, &upper] {
                std::fs::create_dir(path).unwrap();
            }
            let upper = upper.display().to_string();
            run("mount", &["-t", "tmpfs", "tmpfs", &upper]).unwrap();
            run(
                "mkdir",
                &[&format!("{upper}/upper"), &format!("{upper}/work")],
            )
            .unwrap();
            let options = overlay.replace("LOWER", &lower.display().to_string());
            let options = options.replace("UPPER", &upper);
            run("mount", &["-t", "overlay", "-o", &options, "overlay", &dir]).unwrap();
        } else if let Some(options) = options {
            run("mount", &["-t", "tmpfs", "-o", options, "tmpfs", &dir]).unwrap();
        }
        host.put("10-calico.conflist", PRIMARY);
        host.start_ready(&[]);
        let is_kept = options.is_none();
        assert_eq!(
            host.metric(reboot),
            Some(f64::from(u8::from(is_kept))),
            "{options:?}"
        );
        assert_eq!(
            host.log().contains("start-up taint"),
            !is_kept,
            "{}",
            host.log()
        );
        host.stop(Signal::SIGTERM);
        if options.is_some() {
            run("umount", &[&dir]).unwrap();
        }
        if options == Some(overlay) {
            run("umount", &[&upper.display().to_string()]).unwrap();
        }
    }
}

#[test]
fn a_network_behind_an_absolute_link_is_joined_and_the_link_stays() {
    let mut host = Host::new(&[]);
    std::fs::create_dir(host.path("store")).unwrap();
    std::fs::write(host.path("store/cni.json"), PRIMARY).unwrap();
    let link = host.conf_dir().join("10-calico.conflist");
    symlink("/store/cni.json", &link).unwrap();
    host.start_ready(&[]);
    assert!(has_us(&host, OWNED));
    host.stop(Signal::SIGTERM);
    host.start(&["--mode=in-place"]);
    host.until_logged("10-calico.conflist is a symbolic link");
    assert!(!host.is_ready() && link.is_symlink());
    assert_eq!(
        std::fs::read_to_string(host.path("store/cni.json")).unwrap(),
        PRIMARY
    );
}

#[test]
fn whatever_replaces_the_copy_is_replaced_at_once() {
    let mut host = Host::new(&[("10-calico.conflist", PRIMARY)]);
    host.start_ready(&[]);
    let copy = host.conf_dir().join(OWNED);
    let text = host.read(OWNED);
    let replacements: [fn(&Path); 3] = [
        |path| mkfifo(path, Mode::S_IRWXU).unwrap(),
        |path| symlink("/gone", path).unwrap(),
        |path| std::fs::write(path, vec![b' '; 3 << 20]).unwrap(),
    ];
    for replace in replacements {
        std::fs::remove_file(&copy).unwrap();
        replace(&copy);
        host.until("the copy is a file again", |host| {
            copy.symlink_metadata().is_ok_and(|found| found.is_file()) && host.read(OWNED) == text
        });
    }
    host.until_ready();
    assert_eq!(host.stop(Signal::SIGTERM), Some(0));
}

#[test]
fn a_runtime_configuration_that_cannot_be_read_changes_nothing() {
    let mut host = Host::new(&[]);
    let config = host.path("etc/containerd/config.toml");
    for dir in ["etc/containerd", "own/net.d", "own/bin"] {
        std::fs::create_dir_all(host.path(dir)).unwrap();
    }
    let text = "[plugins.cri.cni]\nconf_dir = \"/own/net.d\"\nbin_dir = \"/own/bin\"\n";
    std::fs::write(&config, text).unwrap();
    let own = host.path("own/net.d");
    crate::common::installer_host::put(&own, "10-calico.conflist", PRIMARY);
    host.put("87-podman.conflist", PRIMARY);
    host.start_ready(&["--sweep-seconds=1"]);
    let before = host.tree("own");
    std::fs::write(&config, "[plugins").unwrap();
    host.until_logged("cannot read /etc/containerd/config.toml");
    host.until("the installer is not ready", |host| !host.is_ready());
    assert_eq!(host.tree("own"), before);
    assert!(host.read(OWNED).is_none());
    std::fs::write(&config, text).unwrap();
    host.until_ready();
    // The setting wins, and the difference is reported.
    host.stop(Signal::SIGTERM);
    let settings = ["--conf-dir=/etc/cni/net.d", "--bin-dir=/opt/cni/bin"];
    host.start_ready(&settings);
    let runtime = "inpod_installer_condition{name=\"runtime\"}";
    assert_eq!(host.metric(runtime), Some(0.0), "{}", host.log());
}
