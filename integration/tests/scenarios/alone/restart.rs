//! A full node's services restart: everything is verified, and only drift is written.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::ensure;
use inpod_proto::podevents::v1::{ListPodsRequest, PodState};
use integration::{App, Call, Node, Pod, SERVICES, Spec, TIMEOUT, ask, eventually, run};
use nix::sys::signal::Signal;

/// A node of usual size.
const PODS: usize = 250;
const PORT: u16 = 8080;

/// After this silence, netconfig has read all notifications.
const QUIET: Duration = Duration::from_secs(2);

struct Full {
    pods: Vec<Pod>,
    outsider: Pod,
    _app: App,
    node: Node,
}

impl Full {
    fn new() -> anyhow::Result<Self> {
        let node = Node::running()?;
        let specs = (0..PODS).map(|index| Spec::new(&format!("web-{index}")).ambient());
        let pods = node.pods(specs.collect())?;
        let outsider = node.sandbox(Spec::new("outsider"))?;
        let full = Self {
            _app: App::start(&pods.first().unwrap().netns, PORT)?,
            pods,
            outsider,
            node,
        };
        full.served()?;
        // Until they are checked, the kernel reports changes of them.
        full.pods
            .iter()
            .try_for_each(Pod::until_addresses_are_checked)?;
        Ok(full)
    }

    /// A new connection to an enrolled pod is captured and served.
    fn served(&self) -> anyhow::Result<()> {
        let pod = self.pods.first().unwrap();
        let before = self.node.accesses()?.len();
        ask(&self.outsider.netns, SocketAddr::new(pod.v4.into(), PORT))?;
        ensure!(self.node.accesses()?.len() > before, "it was not captured");
        Ok(())
    }

    /// Returns a service's metrics by a prefix.
    fn numbers(&self, service: &str, prefix: &str) -> BTreeMap<String, u64> {
        let socket = inpod_service::socket(&self.node.run_dir(), service);
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let text = runtime
            .block_on(inpod_service::metrics::fetch(&socket))
            .unwrap();
        let lines = text.lines().filter(|line| line.starts_with(prefix));
        let number = |line: &str| {
            let (name, value) = line.rsplit_once(' ')?;
            Some((name.to_owned(), value.parse().ok()?))
        };
        lines.filter_map(number).collect()
    }

    /// Returns notifications from pods' netns, and searches through all processes.
    fn touched(&self) -> BTreeMap<String, u64> {
        let mut all = self.numbers(
            "netconfig",
            "inpod_netconfig_drift_events_total{netns=\"claimed\"}",
        );
        all.extend(self.numbers("netconfig", "inpod_netconfig_process_walks"));
        all
    }

    /// Returns the same once netconfig has read all notifications of the pods' creation.
    fn touched_at_rest(&self) -> BTreeMap<String, u64> {
        let mut since = (Instant::now(), self.touched());
        eventually("the kernel tells nothing more", TIMEOUT, || {
            let now = self.touched();
            if now != since.1 {
                since = (Instant::now(), now);
            }
            let quiet = since.0.elapsed();
            ensure!(quiet >= QUIET, "it told something {quiet:?} ago");
            anyhow::Ok(())
        })
        .unwrap();
        since.1
    }

    fn verified(&self) -> u64 {
        let name =
            "inpod_netconfig_rules_duration_seconds_count{operation=\"verify\",result=\"OK\"}";
        self.numbers("netconfig", name).values().sum()
    }

    fn until_enrolled(&self) {
        eventually("every pod is in the mesh", TIMEOUT, || {
            let listed = self.node.api().list(ListPodsRequest::default())?;
            let enrolled = listed.iter().filter(|it| it.state() == PodState::Enrolled);
            let enrolled = enrolled.count();
            ensure!(enrolled == PODS, "{enrolled} are");
            anyhow::Ok(())
        })
        .unwrap();
    }

    fn restart(&self, service: &str, signal: Signal) {
        self.node.stop(service, signal).unwrap();
        self.node.start(service).unwrap();
    }
}

fn without_counts(ruleset: &str) -> String {
    let mut words = ruleset.split_whitespace();
    let mut kept = Vec::new();
    while let Some(word) = words.next() {
        kept.push(word);
        if word == "packets" || word == "bytes" {
            words.next();
        }
    }
    kept.join(" ")
}

#[test]
fn a_restart_of_pod_events_verifies_every_pod_and_writes_nothing_and_searches_nothing() {
    let full = Full::new().unwrap();
    // A change that is not inpod's own: of those netconfig hears nothing.
    let netns = format!(
        "--net={}",
        full.pods.first().unwrap().netns.path().display()
    );
    run("nsenter", &[&netns, "nft", "add table inet another"]).unwrap();
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        let (touched, verified) = (full.touched_at_rest(), full.verified());
        // The counts have meaning: the change above has increased them.
        assert!(touched.values().any(|number| *number > 0), "{touched:?}");
        let began = Instant::now();
        full.restart("pod-events", signal);
        full.node.ready().unwrap();
        println!("{signal}: ready after {:?}", began.elapsed());
        full.until_enrolled();
        eventually("every pod is verified", TIMEOUT, || {
            let more = full.verified() - verified;
            ensure!(more >= u64::try_from(PODS)?, "{more} are");
            anyhow::Ok(())
        })
        .unwrap();
        assert_eq!(full.touched(), touched);
        full.served().unwrap();
    }
}

#[test]
fn services_that_are_restarted_in_any_order_under_load_come_to_rest_and_touch_nothing_that_is_right()
 {
    let full = Full::new().unwrap();
    let [netconfig, broker, pod_events] = SERVICES;
    let rules = |pod: &Pod| without_counts(&pod.ruleset().unwrap());
    let before: Vec<_> = full.pods.iter().take(10).map(rules).collect();
    for order in [
        [netconfig, broker, pod_events],
        [pod_events, broker, netconfig],
        [broker, netconfig, pod_events],
    ] {
        let late = full.node.sandbox(Spec::new("late").ambient()).unwrap();
        full.node.until_known(&late.spec).unwrap();
        let add = full.node.call(Call::add, &late);
        // A concurrent ADD succeeds or is answered "try again later".
        let added = std::thread::spawn(move || {
            eventually("the ADD succeeds", TIMEOUT * 2, || {
                let outcome = add.run()?;
                let again = outcome.stdout.contains("\"code\":11");
                assert!(outcome.code == 0 || again, "{outcome:?}");
                ensure!(outcome.code == 0, "not yet: {outcome:?}");
                anyhow::Ok(())
            })
        });
        for service in order {
            full.restart(service, Signal::SIGKILL);
        }
        added.join().unwrap().unwrap();
        full.node.ready().unwrap();
        full.node.until_whole(&late.spec).unwrap();
        full.node.del(&late).unwrap();
        fs::remove_file(full.node.manifests().join("shop-late.yaml")).unwrap();
        full.until_enrolled();
        full.served().unwrap();
    }
    let after: Vec<_> = full.pods.iter().take(10).map(rules).collect();
    assert_eq!(before, after);
    // This netconfig process saw no change in netns that were in sync.
    let changes = full.numbers("netconfig", "inpod_netconfig_rules_differing_total");
    assert!(changes.values().all(|number| *number == 0), "{changes:?}");
}

/// Returns the accepted connections of netns.sock, by inode. The listening socket has the flag `SO_ACCEPTCON`.
fn connections_of_netns_sock(node: &Node) -> BTreeSet<String> {
    let table = format!("/proc/{}/net/unix", node.pid("netconfig").unwrap());
    let socket = node
        .run_dir()
        .join("netns/netns.sock")
        .display()
        .to_string();
    let lines = fs::read_to_string(table).unwrap();
    let fields = lines.lines().map(|line| line.split_whitespace().collect());
    let accepted = fields.filter_map(|fields: Vec<&str>| match fields.as_slice() {
        [_, _, _, flags, _, _, inode, path] if *path == socket => {
            (*flags == "00000000").then(|| (*inode).to_owned())
        }
        _ => None,
    });
    accepted.collect()
}

#[test]
fn every_add_uses_one_connection_of_netns_sock_and_a_restart_of_netconfig_loses_none() {
    let node = Node::running().unwrap();
    let add = |names: std::ops::Range<u32>| {
        let mut seen = BTreeSet::new();
        for name in names {
            let spec = Spec::new(&format!("web-{name}")).ambient();
            let pod = node.sandbox(spec).unwrap();
            node.until_known(&pod.spec).unwrap();
            node.add(&pod).unwrap();
            node.until_whole(&pod.spec).unwrap();
            seen.extend(connections_of_netns_sock(&node));
        }
        seen
    };
    let before = add(0..10);
    assert_eq!(before.len(), 1, "{before:?}");
    for (signal, names) in [(Signal::SIGTERM, 10..15), (Signal::SIGKILL, 15..20)] {
        node.stop("netconfig", signal).unwrap();
        node.start("netconfig").unwrap();
        node.ready().unwrap();
        let after = add(names);
        assert_eq!(after.len(), 1, "{after:?}");
        assert!(after.is_disjoint(&before), "{after:?}");
    }
    let served = node.api().workloads().unwrap().workloads;
    assert_eq!(served.len(), 20);
    assert!(served.iter().all(|workload| workload.descriptor_held));
}
