//! Probes' destinations and source addresses.

use std::{
    fs,
    net::SocketAddr,
    os::unix::fs::MetadataExt as _,
    path::PathBuf,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

use netconfig::{
    probes::{ProbeMatch, ProbeSettings},
    rules::{Ambient, Ipv6},
};

use crate::probes::place::{Arrival, OnNode, POD, Place, TIMEOUT, captured, dial, spared, within};
use crate::programs::install_program;
use crate::support::{Fresh, ambient, plain, sandbox};

fn settings(probe_match: &str) -> ProbeSettings {
    ProbeSettings {
        probe_match: probe_match.parse().unwrap(),
        ..ProbeSettings::default()
    }
}

#[test]
fn a_probe_of_the_node_reaches_the_application_and_a_strangers_call_is_captured() {
    let place = Place::new();
    let host = OnNode::start(&place.node, ProbeSettings::default());
    for (index, to) in POD.into_iter().enumerate() {
        assert_eq!(place.probe(0, to), captured(index)[0], "not named yet");
    }
    host.set_addresses("c1", &POD);
    for (index, to) in POD.into_iter().enumerate() {
        assert_eq!(place.probe(0, to), spared(to));
        assert_eq!(place.probe(4711, to), spared(to));
        assert_eq!(place.call(to), captured(index)[1]);
    }
    host.release("c1");
    for (index, to) in POD.into_iter().enumerate() {
        assert_eq!(place.probe(0, to), captured(index)[0], "released");
    }
}

#[test]
fn other_source_nat_of_the_node_does_not_hide_that_it_is_a_probe() {
    let place = Place::new();
    let masquerade = "table inet theirs { chain post { \
                      type nat hook postrouting priority 100; masquerade; }; }";
    place.node.nft(masquerade);
    let host = OnNode::start(&place.node, ProbeSettings::default());
    host.set_addresses("c1", &POD);
    for to in POD {
        assert_eq!(place.probe(0, to), spared(to));
    }
    // Foreign rules before and after ours, by nft and by iptables.
    for program in ["iptables-nft", "ip6tables-nft"] {
        let rule = ["-t", "nat", "-A", "POSTROUTING", "-j", "MASQUERADE"];
        place.node.command(program, &rule);
    }
    place.node.nft("delete table inet theirs");
    for to in POD {
        assert_eq!(place.probe(0, to), spared(to));
    }
}

#[test]
fn with_a_user_only_that_users_connections_are_probes() {
    let place = Place::new();
    let host = OnNode::start(&place.node, settings("uid:4711"));
    host.set_addresses("c1", &POD);
    for (index, to) in POD.into_iter().enumerate() {
        assert_eq!(place.probe(4711, to), spared(to));
        assert_eq!(place.probe(0, to), captured(index)[0]);
        assert_eq!(place.call(to), captured(index)[1]);
    }
}

/// In the cgroup2 hierarchy, for this test.
struct Cgroup {
    path: PathBuf,
    name: String,
}

impl Cgroup {
    fn new(name: &str) -> Self {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let mount = mounts.lines().find_map(|line| {
            let mut words = line.split(' ');
            let (place, kind) = (words.nth(1)?, words.next()?);
            (kind == "cgroup2").then(|| PathBuf::from(place))
        });
        // Another run on this machine may have the same process ids.
        let netns = fs::metadata("/proc/self/ns/net").unwrap().ino();
        let name = format!("inpod-test-{netns}-{name}");
        let path = mount.expect("cgroup2 is needed (mount it)").join(&name);
        fs::create_dir(&path).expect("a writable cgroup2 is needed");
        Self { path, name }
    }

    /// Connects from a process that enters the cgroup first.
    fn dial(&self, node: &Fresh, to: &str) {
        let procs = self.path.join("cgroup.procs");
        let script = format!(
            "echo $$ > {} && exec 3<>/dev/tcp/{to}/8080",
            procs.display()
        );
        node.command("bash", &["-c", &script]);
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let gone = || fs::remove_dir(&self.path).is_ok() || !self.path.exists();
        within(TIMEOUT, "the cgroup is left", gone);
    }
}

#[test]
fn with_a_cgroup_only_connections_from_it_or_below_are_probes() {
    let place = Place::new();
    let (chosen, other) = (Cgroup::new("chosen"), Cgroup::new("other"));
    let host = OnNode::start(&place.node, settings(&format!("cgroup:{}", chosen.name)));
    host.set_addresses("c1", &POD);
    for (index, to) in POD.into_iter().enumerate() {
        chosen.dial(&place.node, to);
        assert_eq!(place.arrival(), spared(to));
        other.dial(&place.node, to);
        assert_eq!(place.arrival(), captured(index)[0]);
        assert_eq!(place.call(to), captured(index)[1]);
    }
    let below = Cgroup {
        path: chosen.path.join("below"),
        name: String::new(),
    };
    fs::create_dir(&below.path).unwrap();
    below.dial(&place.node, POD[0]);
    assert_eq!(place.arrival(), spared(POD[0]));
}

/// A restarted unit's new cgroup has the same name.
#[test]
fn a_cgroup_that_is_made_anew_is_found_again() {
    let place = Place::new();
    let chosen = Cgroup::new("anew");
    let text = format!("cgroup:{}", chosen.name);
    let host = OnNode::start(&place.node, settings(&text));
    host.set_addresses("c1", &POD);
    let _guard = host.start_reconciler();
    fs::remove_dir(&chosen.path).unwrap();
    within(TIMEOUT, "its absence is reported", || {
        !host.is_ok("probe-match")
    });
    fs::create_dir(&chosen.path).unwrap();
    within(TIMEOUT, "its presence is reported", || {
        host.is_ok("probe-match")
    });
    let spares = || {
        chosen.dial(&place.node, POD[0]);
        place.arrival() == spared(POD[0])
    };
    within(TIMEOUT, "its connections are probes again", spares);
    assert_eq!(host.host.restores(), 0);
}

/// A copy of sleep, named kubelet, with its own user.
struct Kubelet {
    process: std::process::Child,
    _directory: tempfile::TempDir,
}

impl Kubelet {
    fn start(node: &Fresh, user: u32) -> Self {
        use std::os::unix::process::CommandExt as _;
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("kubelet");
        install_program(std::path::Path::new("/bin/sleep"), &program);
        fs::set_permissions(
            directory.path(),
            std::os::unix::fs::PermissionsExt::from_mode(0o755),
        )
        .unwrap();
        let mut command = Command::new(&program);
        command.arg("600").uid(user);
        let process = node.run(move || command.spawn()).unwrap();
        let pid = process.id();
        within(TIMEOUT, "kubelet runs", || {
            fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|text| text == "kubelet\n")
        });
        Self {
            process,
            _directory: directory,
        }
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

/// Two tests would find each other's kubelet.
#[test]
fn the_kubelets_user_is_found_and_found_again_and_without_one_nothing_is_named() {
    let place = Place::new();
    let host = OnNode::start(&place.node, settings("kubelet"));
    assert!(!host.is_ok("probe-match"));
    let error = host.try_name("c1", &POD).unwrap_err();
    assert!(error.contains("the node's probe rule"), "{error}");
    assert!(error.contains("kubelet"), "{error}");
    assert_eq!(place.node.nft("list ruleset"), "");
    let first = Kubelet::start(&place.node, 4711);
    // An urgent request searches at once.
    host.set_addresses("c1", &POD);
    let _guard = host.start_reconciler();
    within(TIMEOUT, "it is reported", || host.is_ok("probe-match"));
    assert_eq!(host.host.kubelet_user(), Some(4711));
    assert_eq!(place.probe(4711, POD[0]), spared(POD[0]));
    assert_eq!(place.probe(0, POD[0]), captured(0)[0]);
    drop(first);
    let _second = Kubelet::start(&place.node, 4712);
    let timeout = Duration::from_secs(15);
    within(timeout, "the new one is found", || {
        host.host.kubelet_user() == Some(4712)
    });
    within(TIMEOUT, "its connections are probes", || {
        place.probe(4712, POD[0]) == spared(POD[0])
    });
    assert_eq!(place.probe(4711, POD[0]), captured(0)[0]);
}

#[test]
fn off_writes_nothing_and_lets_nothing_through() {
    let place = Place::new();
    let host = OnNode::start(&place.node, settings("off"));
    let _guard = host.start_reconciler();
    assert!(!host.set_addresses("c1", &POD));
    host.release("c1");
    assert_eq!(place.node.nft("list ruleset"), "");
    assert_eq!(place.node.command("ipset", &["list", "-n"]), "");
    let spared_nobody = plain().apply(&place.pod.netns, &ambient(), &sandbox("c1"));
    assert!(spared_nobody.unwrap().changed);
    assert_eq!(place.probe(0, POD[0]), captured(0)[0]);
    assert_eq!(settings("off").sources().len(), 0);
    assert_eq!(settings("off").probe_match, ProbeMatch::Off);
}

#[test]
fn a_pod_of_both_families_is_probed_at_both_where_ipv6_is_not_captured() {
    let place = Place::with(Ambient {
        ipv6: Ipv6::Off,
        ..Ambient::default()
    });
    let host = OnNode::start(&place.node, ProbeSettings::default());
    host.set_addresses("c1", &POD);
    for to in POD {
        assert_eq!(place.probe(0, to), spared(to));
    }
    assert!(matches!(place.call(POD[1]), Arrival::Direct(_)));
    host.release("c1");
}

#[test]
fn a_pod_of_both_families_is_named_and_released_on_a_node_without_ipv6() {
    let place = Place::new();
    place
        .node
        .command("sysctl", &["-qw", "net.ipv6.conf.all.disable_ipv6=1"]);
    let host = OnNode::start(&place.node, ProbeSettings::default());
    host.set_addresses("c1", &POD);
    assert_eq!(place.probe(0, POD[0]), spared(POD[0]));
    assert!(!host.set_addresses("c1", &POD));
    host.release("c1");
    assert_eq!(place.probe(0, POD[0]), captured(0)[0]);
}

/// No probe may fail or be captured.
fn probe_until(stop: &AtomicBool, probes: &AtomicU32, place: &Place) {
    while !stop.load(Ordering::Relaxed) {
        for to in POD {
            let stream = dial(0, SocketAddr::new(to.parse().unwrap(), 8080));
            assert!(stream.is_some(), "a probe failed");
            assert_eq!(place.arrival(), spared(to));
            probes.fetch_add(1, Ordering::Relaxed);
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Elements and rule are never absent, even during changes.
#[test]
fn a_prober_at_constant_rate_sees_no_gap_while_the_host_is_started_again_and_again() {
    let place = Arc::new(Place::new());
    OnNode::start(&place.node, ProbeSettings::default()).set_addresses("c1", &POD);
    let (stop, probes) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicU32::new(0)),
    );
    let prober = {
        let (at, stop, probes) = (Arc::clone(&place), Arc::clone(&stop), Arc::clone(&probes));
        // Its own thread in the node's netns: the node's thread starts probe sets meanwhile.
        let probe = move || probe_until(&stop, &probes, &at);
        place.node.run(move || thread::spawn(probe))
    };
    let mut starts = 0;
    while !prober.is_finished() && (starts < 10 || probes.load(Ordering::Relaxed) < 200) {
        for probe_match in ["uid:0", "socket"] {
            // Each start has its own repair budget.
            let host = OnNode::start(&place.node, settings(probe_match));
            let reported = host.readiness.all();
            assert!(host.is_ok("probe-set"), "{reported:?}");
            assert_eq!(host.host.elements(), 2);
            starts += 1;
        }
    }
    stop.store(true, Ordering::Relaxed);
    prober.join().unwrap();
}
