//! Replays components that rewrite the chain.

use std::{
    fs,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use crate::{
    common::installer_host::{Host, PRIMARY, put},
    netns::installer::reader::{Reader, is_loaded, types},
};

const CILIUM: &str = "{\n  \"cniVersion\": \"0.3.1\",\n  \"name\": \"cilium\",\n  \"plugins\": [ { \"type\": \"cilium-cni\", \"enable-debug\": false } ]\n}\n";

fn served(host: &Host, file: &str, primary: &str) -> bool {
    let types = host.read(file).and_then(|text| types(text.as_bytes()));
    types.is_some_and(|types| {
        types.first().is_some_and(|kind| kind == primary)
            && types.iter().any(|kind| kind == "inpod-cni")
    })
}

/// `cni.exclusive=true` at each start of Cilium's agent: renames every file that is not
/// Cilium's. Returns their number.
fn cilium(dir: &Path) -> usize {
    let mut taken = 0;
    for entry in fs::read_dir(dir).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if is_loaded(&name) && name != "05-cilium.conflist" {
            fs::rename(dir.join(&name), dir.join(format!("{name}.cilium_bak"))).unwrap_or_default();
            taken += 1;
        }
    }
    if !dir.join("05-cilium.conflist").exists() {
        put(dir, "05-cilium.conflist", CILIUM);
    }
    taken
}

// scenario: 24
#[test]
fn after_cilium_has_taken_everything_away_once_inpod_is_back_in_its_chain() {
    let mut host = Host::new(&[("10-calico.conflist", PRIMARY)]);
    host.start_ready(&[]);
    assert_eq!(cilium(&host.conf_dir()), 2);
    host.until("inpod is in Cilium's chain", |host| {
        served(host, "02-inpod.conflist", "cilium-cni")
    });
    host.until_ready();
}

// scenario: 24
#[test]
fn against_a_cilium_that_never_stops_writes_are_few_and_the_remedy_is_reported() {
    let mut host = Host::new(&[("05-cilium.conflist", CILIUM)]);
    host.start_ready(&[]);
    let (stop, taken) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicUsize::new(0)),
    );
    let fight = thread::spawn({
        let (dir, stop, taken) = (host.conf_dir(), Arc::clone(&stop), Arc::clone(&taken));
        move || {
            while !stop.load(Ordering::Relaxed) {
                taken.fetch_add(cilium(&dir), Ordering::Relaxed);
                thread::sleep(Duration::from_millis(1));
            }
        }
    });
    host.until_logged("cni.exclusive=false");
    thread::sleep(Duration::from_secs(3));
    assert!(!host.is_ready());
    assert_eq!(
        host.metric("inpod_installer_condition{name=\"chain\"}"),
        Some(0.0)
    );
    assert!(host.metric("inpod_installer_fights_total").unwrap() >= 1.0);
    stop.store(true, Ordering::Relaxed);
    fight.join().unwrap();
    // The first, five at once, then after 1, 2, 4 seconds and so on: up to eleven in a minute of conflict.
    let taken = taken.load(Ordering::Relaxed);
    assert!((5..=11).contains(&taken), "{taken} rewrites");
    host.until("inpod is back", |host| {
        served(host, "02-inpod.conflist", "cilium-cni")
    });
    host.until_ready();
}

// scenario: 24
#[test]
fn calico_that_rewrites_its_file_again_and_again_is_followed_without_a_gap() {
    let mut host = Host::new(&[("10-calico.conflist", PRIMARY)]);
    host.start_ready(&[]);
    let reader = Reader::of(host.conf_dir());
    let primary = |number: u32| PRIMARY.replace("1e40", &number.to_string());
    for number in 1..=50 {
        host.put("10-calico.conflist", &primary(1000 + number));
        thread::sleep(Duration::from_millis(20));
    }
    host.until("the last change is in the copy", |host| {
        host.read("02-inpod.conflist")
            .is_some_and(|text| text.contains("1050"))
    });
    let seen = reader.stop();
    assert!(
        seen.reads > 50 && seen.broken.is_empty() && seen.without_us.is_empty(),
        "{seen:?}"
    );
    let rewrites = host
        .metric("inpod_installer_rewrites_total{cause=\"followed\"}")
        .unwrap();
    assert!((1.0..=12.0).contains(&rewrites), "{rewrites}");
    assert_eq!(host.read("10-calico.conflist"), Some(primary(1050)));
}

// scenario: 24
#[test]
fn in_place_calicos_own_changes_are_never_lost() {
    let mut host = Host::new(&[("10-calico.conflist", PRIMARY)]);
    host.start_ready(&["--mode=in-place"]);
    let primary = |number: u32| PRIMARY.replace("1e40", &number.to_string());
    for number in 1..=30 {
        host.put("10-calico.conflist", &primary(1000 + number));
        thread::sleep(Duration::from_millis(7));
        let text = host.read("10-calico.conflist").unwrap();
        assert!(
            text.contains(&(1000 + number).to_string()),
            "{number}: {text}"
        );
    }
    host.until("inpod is back", |host| {
        served(host, "10-calico.conflist", "calico")
    });
}

#[test]
fn k3s_that_writes_the_same_again_causes_no_write() {
    let mut host = Host::new(&[("10-flannel.conflist", PRIMARY)]);
    host.start_ready(&[]);
    let ours = |host: &Host| {
        host.tree("etc")
            .remove(&host.conf_dir().join("02-inpod.conflist"))
    };
    let before = ours(&host);
    for _ in 0..10 {
        host.put("10-flannel.conflist", PRIMARY);
        thread::sleep(Duration::from_millis(10));
    }
    // All other events are handled before this.
    host.put("10-flannel.conflist", &PRIMARY.replace("true", "false"));
    host.until("the change is followed", |host| ours(host) != before);
    assert_eq!(
        host.metric("inpod_installer_rewrites_total{cause=\"followed\"}"),
        Some(1.0)
    );
}

// scenario: 24
#[test]
fn an_istio_cni_that_still_runs_is_named_and_the_writes_are_few() {
    let mut host = Host::new(&[("10-calico.conflist", PRIMARY)]);
    host.start_ready(&["--mode=in-place"]);
    let dir = host.conf_dir();
    let mut written = 0;
    for _ in 0..600 {
        // Its installer appends itself where missing and re-serializes the file.
        let text = host.read("10-calico.conflist").unwrap();
        if !text.contains("istio-cni") {
            let end = text.rfind(']').unwrap();
            put(
                &dir,
                "10-calico.conflist",
                &format!(
                    "{}, {{\"type\":\"istio-cni\"}}{}",
                    &text[..end],
                    &text[end..]
                ),
            );
            written += 1;
        }
        thread::sleep(Duration::from_millis(5));
    }
    host.until_logged("remove the DaemonSet istio-cni-node first");
    assert!((5..=9).contains(&written), "{written}");
    host.until("the incumbent is out", |host| {
        host.read("10-calico.conflist")
            .is_some_and(|text| !text.contains("istio-cni"))
    });
}
