//! The plugin in the runtime's directory.

use std::{
    fs,
    io::Write as _,
    process::{Command, Stdio},
};

use integration::{bin, guard, install_program, run};
use nix::sys::signal::Signal;

use crate::common::installer_host::{Host, PRIMARY};

#[test]
fn the_real_plugin_is_upgraded_while_it_is_executed() {
    let mut host = Host::new(&[("10-calico.conflist", PRIMARY)]);
    let source = host.path("image/inpod-cni");
    install_program(&bin("inpod-cni").unwrap(), &source).unwrap();
    host.start_ready(&[]);
    let mut running = Command::new(host.installed());
    running
        .env_clear()
        .env("CNI_COMMAND", "ADD")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut running = running.spawn().unwrap();
    host.stop(Signal::SIGTERM);
    // An ELF file may have any data after its end.
    fs::OpenOptions::new()
        .append(true)
        .open(&source)
        .unwrap()
        .write_all(b"later")
        .unwrap();
    host.start_ready(&[]);
    assert_eq!(
        fs::read(host.installed()).unwrap(),
        fs::read(&source).unwrap()
    );
    assert!(
        running.try_wait().unwrap().is_none(),
        "the call under way goes on"
    );
    drop(running.stdin.take());
    let answer = running.wait_with_output().unwrap();
    assert!(
        String::from_utf8_lossy(&answer.stdout).contains("\"code\""),
        "{answer:?}"
    );
}

#[test]
fn a_plugin_that_does_not_work_takes_the_place_of_none_and_the_chain_waits_for_it() {
    let mut host = Host::new(&[("10-calico.conflist", PRIMARY)]);
    fs::write(host.path("image/inpod-cni"), "for another machine").unwrap();
    host.start(&[]);
    host.until_logged("does not work");
    host.until("both conditions are told", |host| {
        host.metric("inpod_installer_condition{name=\"chain\"}") == Some(0.0)
    });
    assert!(host.read("02-inpod.conflist").is_none() && !host.installed().exists());
    assert!(
        host.metric("inpod_installer_installs_total{result=\"unusable\"}")
            .unwrap()
            >= 1.0
    );
}

#[test]
fn a_missing_directory_is_reported_with_the_setting_and_taken_when_it_comes() {
    let mut host = Host::new(&[("10-calico.conflist", PRIMARY)]);
    fs::remove_dir(host.path("opt/cni/bin")).unwrap();
    host.start(&[]);
    host.until_logged("set bin_dir");
    assert!(!host.is_ready() && host.read("02-inpod.conflist").is_none());
    fs::create_dir(host.path("opt/cni/bin")).unwrap();
    host.until_ready();
}

#[test]
fn a_read_only_directory_is_reported_with_the_platform_and_one_with_the_plugin_in_it_will_do() {
    guard().unwrap();
    let mut host = Host::new(&[("10-calico.conflist", PRIMARY)]);
    let [dir, filled] = ["opt/cni/bin", "filled"].map(|name| host.path(name));
    fs::create_dir(&filled).unwrap();
    let [at, filled_at] = [&dir, &filled].map(|dir| dir.display().to_string());
    let options = "size=64m,mode=0755";
    for at in [&at, &filled_at] {
        run("mount", &["-t", "tmpfs", "-o", options, "tmpfs", at]).unwrap();
    }
    install_program(&host.path("image/inpod-cni"), &filled.join("inpod-cni")).unwrap();
    for at in [&at, &filled_at] {
        run("mount", &["-o", "remount,ro", at]).unwrap();
    }
    host.start(&[]);
    host.until_logged("read-only file system: set bin_dir");
    assert!(!host.is_ready() && host.read("02-inpod.conflist").is_none());
    // The installer never sees a directory that it may write to.
    run("mount", &["--bind", &filled_at, &at]).unwrap();
    host.until_ready();
    host.stop(Signal::SIGTERM);
    // A binary from before inpod stays after uninstall.
    let left = host.run(&["uninstall"]);
    assert!(
        left.status.success(),
        "{}",
        String::from_utf8_lossy(&left.stderr)
    );
    assert!(host.installed().exists() && host.read("02-inpod.conflist").is_none());
    for at in [&at, &at, &filled_at] {
        run("umount", &["--lazy", at]).unwrap();
    }
}

#[test]
fn the_plugin_is_installed_in_the_first_directory_that_can_be_written_and_removed_from_all() {
    let mut host = Host::new(&[("10-calico.conflist", PRIMARY)]);
    let crio = host.path("etc/crio");
    fs::create_dir(&crio).unwrap();
    let configure = |dirs: &str| {
        let text = format!("[crio.network]\nplugin_dirs = [{dirs}]\n");
        fs::write(crio.join("crio.conf"), text).unwrap();
    };
    configure("\"/usr/libexec/cni\", \"/opt/cni/bin\"");
    let later = host.path("usr/libexec/cni");
    host.start_ready(&["--sweep-seconds=1"]);
    assert!(host.installed().exists() && !later.exists());
    // An update of the runtime moves its directory, and the earlier plugin stays until the end for calls in progress.
    fs::create_dir_all(&later).unwrap();
    configure("\"/usr/libexec/cni\"");
    host.until("the plugin is in the new directory", |_| {
        later.join("inpod-cni").exists()
    });
    host.until_ready();
    assert!(host.installed().exists());
    host.stop(Signal::SIGTERM);
    assert!(host.run(&["uninstall"]).status.success());
    assert!(!host.installed().exists() && !later.join("inpod-cni").exists());
}

#[test]
fn a_plugin_that_does_not_speak_the_version_of_the_list_is_not_called() {
    let mut host = Host::new(&[("10-calico.conflist", &PRIMARY.replace("1.0.0", "1.2.0"))]);
    host.start(&[]);
    host.until_logged("does not speak the cniVersion");
    let said = String::from_utf8(host.run(&["--check"]).stderr).unwrap();
    assert!(said.contains("\"1.2.0\" of 10-calico.conflist"), "{said}");
    assert!(!host.is_ready() && host.read("02-inpod.conflist").is_none());
    host.put("10-calico.conflist", PRIMARY);
    host.until_ready();
}

#[test]
fn a_directory_that_becomes_noexec_is_reported() {
    guard().unwrap();
    let mut host = Host::new(&[("10-calico.conflist", PRIMARY)]);
    let dir = host.path("opt/cni/bin").display().to_string();
    run("mount", &["-t", "tmpfs", "-o", "mode=0755", "tmpfs", &dir]).unwrap();
    host.start_ready(&["--sweep-seconds=1"]);
    run("mount", &["-o", "remount,noexec", &dir]).unwrap();
    host.until_logged("the plugin in /opt/cni/bin does not work");
    host.until("the installer is not ready", |host| !host.is_ready());
    assert!(host.read("02-inpod.conflist").is_some());
    run("mount", &["-o", "remount,exec", &dir]).unwrap();
    host.until_ready();
    host.stop(Signal::SIGTERM);
    run("umount", &[&dir]).unwrap();
}

#[test]
fn an_uninstall_that_would_leave_the_entry_keeps_the_plugin() {
    let mut host = Host::new(&[("10-calico.conflist", PRIMARY)]);
    host.start_ready(&["--mode=in-place"]);
    host.stop(Signal::SIGTERM);
    let edited = host.read("10-calico.conflist").unwrap();
    host.put("10-calico.conflist", &edited[..edited.len() - 3]);
    let refused = host.run(&["uninstall", "--mode=in-place"]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(said.contains("10-calico.conflist is invalid"), "{said}");
    assert!(!refused.status.success() && host.installed().exists());
    host.put("10-calico.conflist", &edited);
    assert!(host.run(&["uninstall", "--mode=in-place"]).status.success());
    assert_eq!(host.read("10-calico.conflist").as_deref(), Some(PRIMARY));
}
