//! SIGKILL before each change that an installation makes.

use std::fs;

use nix::sys::signal::Signal;

use crate::{
    common::installer_host::{Host, PRIMARY},
    netns::installer::reader::{Reader, is_loaded, types},
};

/// The system calls by which files change, as strace counts them: each kind by itself. An architecture lacks some.
const CHANGES: [&str; 6] = [
    "?mkdir,?mkdirat",
    "write",
    "?fchmod,?fchmodat",
    "fsync",
    "?rename,?renameat,?renameat2",
    "?unlink,?unlinkat",
];

/// Fewer changes are no installation.
const MIN_CHANGES: u32 = 20;

/// The directory must be valid with inpod in the chain or without.
fn is_in_the_chain(host: &Host, mode: &str, point: &str) -> bool {
    for (path, (content, ..)) in host.tree("etc") {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let is_whole = !is_loaded(&name) || types(&content).is_some();
        assert!(is_whole, "{point}: {name}");
    }
    let text = host.read("10-calico.conflist").unwrap();
    let first = host.read("02-inpod.conflist");
    let is_ours = first.as_ref().unwrap_or(&text).contains("inpod-cni");
    let is_edited = mode.ends_with("place") && text.contains("inpod-cni");
    assert!(text == PRIMARY || is_edited, "{point}: {text}");
    // An entry without a plugin fails every pod.
    assert!(!is_ours || host.installed().exists(), "{point}");
    is_ours
}

#[test]
fn killed_at_any_change_the_directory_is_valid_and_everything_comes_back() {
    for mode in ["--mode=owned", "--mode=in-place"] {
        let mut host = Host::new(&[("10-calico.conflist", PRIMARY)]);
        let original = host.contents("etc");
        let reader = Reader::of(host.conf_dir());
        let (mut all, mut whole) = (0, 0);
        for calls in CHANGES {
            for n in 1.. {
                let point = format!("{mode} {calls} {n}");
                host.start_killed_at(n, calls, &[mode]);
                let is_killed = host.is_killed();
                if is_killed {
                    all += 1;
                    whole += u32::from(is_in_the_chain(&host, mode, &point));
                }
                // What is left is taken over, or removed.
                if is_killed && n % 2 == 0 {
                    host.start_ready(&[mode]);
                }
                if !is_killed || n % 2 == 0 {
                    host.stop(Signal::SIGKILL);
                }
                let left = host.run(&["uninstall", mode]);
                assert!(left.status.success(), "{point}: {left:?}");
                assert_eq!(host.contents("etc"), original, "{point}");
                let is_left = host.installed().exists() || !host.tree("var").is_empty();
                assert!(!is_left, "{point}");
                if !is_killed {
                    break;
                }
            }
        }
        println!("{mode}: {whole} of {all} got as far as the chain");
        assert!(all >= MIN_CHANGES && whole > 0 && whole < all);
        let seen = reader.stop();
        assert!(seen.broken.is_empty(), "{mode}: {seen:?}");
        host.start_ready(&[mode]);
        host.stop(Signal::SIGTERM);
        assert!(host.run(&["uninstall", mode]).status.success());
        assert_eq!(host.contents("etc"), original);
        let mut installed = fs::read_dir(host.path("opt/cni/bin")).unwrap();
        assert!(installed.next().is_none());
    }
}
