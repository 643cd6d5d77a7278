//! SIGKILL at any moment of an installation.

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;

use crate::{
    host::{Host, PRIMARY},
    reader::{Reader, types},
};

/// Returns one and a half times an installation's duration here, in milliseconds.
fn time_to_install(host: &mut Host, mode: &'static str) -> u64 {
    let began = Instant::now();
    host.start(&[mode]);
    host.until("inpod is in the chain", |host| {
        let names = ["02-inpod.conflist", "10-calico.conflist"];
        let mut texts = names.iter().filter_map(|name| host.read(name));
        texts.any(|text| text.contains("inpod-cni"))
    });
    let span = u64::try_from(began.elapsed().as_millis()).unwrap() * 3 / 2;
    host.stop(Signal::SIGKILL);
    assert!(host.run(&["uninstall", mode]).status.success());
    span
}

/// The directory must be valid with inpod in the chain or without.
fn is_in_the_chain(host: &Host, mode: &str, round: usize) -> bool {
    for (path, (content, ..)) in host.tree("etc") {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let is_whole = !inpod_cni_config::is_loaded(&name) || types(&content).is_some();
        assert!(is_whole, "{round}: {name}");
    }
    let text = host.read("10-calico.conflist").unwrap();
    let first = host.read("02-inpod.conflist");
    let is_ours = first.as_ref().unwrap_or(&text).contains("inpod-cni");
    let is_edited = mode.ends_with("place") && text.contains("inpod-cni");
    assert!(text == PRIMARY || is_edited, "{round}: {text}");
    // An entry without a plugin fails every pod.
    assert!(!is_ours || host.installed().exists(), "{round}");
    is_ours
}

#[test]
fn killed_two_hundred_times_at_random_the_directory_is_valid_and_everything_comes_back() {
    fastrand::seed(7);
    for mode in ["--mode=owned", "--mode=in-place"] {
        let mut host = Host::new(&[("10-calico.conflist", PRIMARY)]);
        let original = host.contents("etc");
        let reader = Reader::of(host.conf_dir());
        // The first one has cold caches.
        let spans = [(); 3].map(|()| time_to_install(&mut host, mode));
        let span = spans.into_iter().min().unwrap();
        let mut whole = 0;
        for round in 0..100 {
            host.start(&[mode]);
            thread::sleep(Duration::from_millis(fastrand::u64(0..=span)));
            host.stop(Signal::SIGKILL);
            let is_ours = is_in_the_chain(&host, mode, round);
            whole += usize::from(is_ours);
            if round % 2 == 0 {
                // A new installation starts from nothing.
                let left = host.run(&["uninstall", mode]);
                assert!(
                    left.status.success(),
                    "{round}: {}",
                    String::from_utf8_lossy(&left.stderr)
                );
                assert_eq!(host.contents("etc"), original, "{round}");
                assert!(
                    !host.installed().exists() && host.tree("var").is_empty(),
                    "{round}"
                );
            }
        }
        let seen = reader.stop();
        assert!(seen.broken.is_empty(), "{mode}: {seen:?}");
        assert!(
            (5..95).contains(&whole),
            "{mode}: {whole} of 100 got as far as the chain"
        );
        host.start_ready(&[mode]);
        host.stop(Signal::SIGTERM);
        assert!(host.run(&["uninstall", mode]).status.success());
        assert_eq!(host.contents("etc"), original);
        assert!(
            fs::read_dir(host.path("opt/cni/bin"))
                .unwrap()
                .next()
                .is_none()
        );
    }
}
