//! Many ADDs and DELs at once: who waits for whom, what a refused one leaves, and what it costs pod-events.
#![expect(clippy::unwrap_used, reason = "a test that fails panics")]

use std::{collections::BTreeSet, fs, path::Path, thread, time::Duration};

use anyhow::ensure;
use inpod_proto::types::v1::Enrollment;
use integration::{
    Answer, Moment, Named, Node, PATIENCE, Pod, Proxy, SERVICES, Spec, Step, Verbs, eventually,
    number,
};
use workload::Reason;

/// What the plugin gives the agent.
const PLUGIN: Duration = Duration::from_secs(30);

/// How many sandboxes stand before the burst and end in it.
const STAND: usize = 80;
/// How many sandboxes of the mesh come in it and stay.
const STAY: usize = 80;
/// How many sandboxes of the mesh come in it and end meanwhile.
const COME_AND_GO: usize = 40;
/// How many pods outside of the mesh come in it and end meanwhile.
const OUTSIDE: usize = 190;
/// How many pods of the mesh come whose netns is not there, and end meanwhile.
const LOST: usize = 190;

/// What pod-events may need at most, in KiB. Measured: see the report of the test.
const MOST_RESIDENT: u64 = 128 * 1024;

struct Bench {
    node: Node,
    verbs: Verbs,
}

impl Bench {
    fn over(node: Node) -> Self {
        let socket = daemon::socket(&node.run_dir(), "pod-events");
        let verbs = Verbs::at(&socket).unwrap();
        Self { node, verbs }
    }

    /// A node without a ztunnel.
    fn without_ztunnel() -> Self {
        let node = Node::new().unwrap();
        SERVICES
            .iter()
            .try_for_each(|service| node.start(service))
            .unwrap();
        let bench = Self::over(node);
        eventually("the agent is ready", PATIENCE, || {
            ensure!(bench.node.api().status()?.ready, "not yet");
            anyhow::Ok(())
        })
        .unwrap();
        bench
    }

    fn metric(&self, name: &str) -> f64 {
        let socket = daemon::socket(&self.node.run_dir(), "pod-events");
        let metrics = self.verbs.metrics(&socket).unwrap();
        number(&metrics, &format!("inpod_pod_events_{name}"))
    }

    /// Waits until a metric has a number.
    fn until(&self, name: &str, wanted: f64) {
        eventually(name, PATIENCE, || {
            let found = self.metric(name);
            ensure!((found - wanted).abs() < 0.5, "{found}");
            anyhow::Ok(())
        })
        .unwrap();
    }

    /// How many descriptors each service has.
    fn descriptors(&self) -> Vec<usize> {
        let count = |service: &&str| {
            let pid = self.node.pid(service).unwrap();
            fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
        };
        SERVICES.iter().map(count).collect()
    }

    /// The most memory that pod-events ever had, in KiB.
    fn peak(&self) -> u64 {
        let pid = self.node.pid("pod-events").unwrap();
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let text = line.unwrap().trim().trim_end_matches("kB").trim();
        text.parse().unwrap()
    }

    /// The UIDs that somebody still knows: the broker's, and those of claims by their path.
    fn known(&self) -> (BTreeSet<String>, BTreeSet<String>, usize) {
        let workloads = self.node.api().workloads().unwrap().workloads;
        let uids = workloads.into_iter().map(|it| it.workload.unwrap().uid);
        let claims = self.node.api().claims().unwrap();
        let paths = claims.into_iter().map(|claim| claim.path);
        let records = self.node.run_dir().join("pod-events/pods");
        let records = fs::read_dir(records).unwrap().count();
        (uids.collect(), paths.collect(), records)
    }
}

fn specs(prefix: &str, count: usize) -> Vec<Spec> {
    let name = |number| format!("{prefix}-{number}");
    (0..count).map(|number| Spec::new(&name(number))).collect()
}

fn ambient(prefix: &str, count: usize) -> Vec<Spec> {
    specs(prefix, count)
        .into_iter()
        .map(Spec::ambient)
        .collect()
}

/// Sandboxes whose netns nobody opens, or that is not there.
fn unreal(node: &Node, specs: &[Spec], first: usize) -> Vec<Named> {
    specs
        .iter()
        .try_for_each(|spec| node.write_manifest(spec))
        .unwrap();
    let name = |(number, spec): (usize, &Spec)| {
        let id = format!("{:064x}", 0xf000_0000 + first + number);
        let path = format!("/run/netns/no-{}", spec.name);
        Named::at(spec, &id, Path::new(&path))
    };
    specs.iter().enumerate().map(name).collect()
}

/// The time within which as many of a hundred were answered.
fn percentile<T>(answers: &[Answer<T>], of: usize) -> Duration {
    let mut took: Vec<_> = answers.iter().map(|answer| answer.took).collect();
    took.sort();
    took[(took.len() * of / 100).min(took.len() - 1)]
}

/// How many ended how.
fn outcomes<T>(answers: &[Answer<T>]) -> std::collections::BTreeMap<String, usize> {
    let mut counts = std::collections::BTreeMap::new();
    for answer in answers {
        let name = answer.result.as_ref().map_or_else(
            |failure| failure.reason.name().to_owned(),
            |_| "ok".to_owned(),
        );
        *counts.entry(name).or_default() += 1;
    }
    counts
}

#[test]
#[expect(clippy::print_stderr, reason = "what was measured is for the reader")]
fn a_burst_of_500_adds_and_500_dels_ends_every_call_with_a_reason_and_leaves_nothing_of_the_refused()
 {
    let node = Node::running().unwrap();
    let lost = unreal(&node, &ambient("lost", LOST), 0);
    let outside = unreal(&node, &specs("outside", OUTSIDE), LOST);
    let standing = node.pods(ambient("stand", STAND)).unwrap();
    let coming = node.sandboxes(ambient("stay", STAY)).unwrap();
    let going = node.sandboxes(ambient("go", COME_AND_GO)).unwrap();
    for pod in coming.iter().chain(&going) {
        node.until_known(&pod.spec).unwrap();
    }
    let bench = Bench::over(node);
    let named = |pods: &[Pod]| pods.iter().map(Named::of).collect::<Vec<_>>();
    let (standing_named, coming_named, going_named) =
        (named(&standing), named(&coming), named(&going));
    // Every connection is there before descriptors are counted.
    let nobody = Named::at(
        &Spec::new("nobody"),
        &"e".repeat(64),
        Path::new("/run/netns/e"),
    );
    let warm = (0..8).map(|_| bench.verbs.del(&nobody)).collect();
    bench.verbs.answers(warm).unwrap();
    let (before, resident) = (
        bench.descriptors(),
        bench.node.resident("pod-events").unwrap(),
    );

    let ends = |sandboxes: &[Named]| {
        sandboxes
            .iter()
            .map(|it| bench.verbs.del(it))
            .collect::<Vec<_>>()
    };
    let mut dels = ends(&standing_named);
    let mut adds = Vec::new();
    // Interleaved: one DEL for each of these, a moment after its ADD.
    for group in [&lost, &going_named, &coming_named, &outside] {
        adds.extend(group.iter().map(|it| bench.verbs.add(it, PLUGIN)));
    }
    thread::sleep(Duration::from_millis(50));
    for group in [&lost, &going_named, &outside] {
        dels.extend(ends(group));
    }
    assert_eq!((adds.len(), dels.len()), (500, 500));
    let dels = bench.verbs.answers(dels).unwrap();
    let adds = bench.verbs.answers(adds).unwrap();
    let peak = bench.peak();
    eprintln!(
        "ADD p50 {:?} p99 {:?} {:?}; DEL p50 {:?} p99 {:?} {:?}; resident {resident} KiB before, {peak} KiB at most",
        percentile(&adds, 50),
        percentile(&adds, 99),
        outcomes(&adds),
        percentile(&dels, 50),
        percentile(&dels, 99),
        outcomes(&dels),
    );

    assert_eq!(outcomes(&dels), [("ok".to_owned(), 500)].into());
    for answer in &adds {
        if let Err(failure) = &answer.result {
            assert!(failure.reason != Reason::Internal, "{failure}");
            assert!(failure.undo_failures.is_empty(), "{failure:?}");
        }
        assert!(answer.took < PLUGIN, "{answer:?}");
    }
    let stay = &adds[LOST + COME_AND_GO..LOST + COME_AND_GO + STAY];
    assert_eq!(outcomes(stay), [("ok".to_owned(), STAY)].into());
    assert!(
        percentile(&dels, 99) <= percentile(&adds, 99),
        "DELs wait behind ADDs"
    );
    assert!(peak < MOST_RESIDENT, "{peak} KiB");

    // A runtime repeats the DEL of what it was not sure of; what came after its DEL ends now.
    for group in [&lost, &going_named, &outside] {
        let again = bench.verbs.answers(ends(group)).unwrap();
        assert!(again.iter().all(|answer| answer.result.is_ok()));
    }
    let uids: BTreeSet<_> = coming.iter().map(|pod| pod.spec.uid.clone()).collect();
    let paths: BTreeSet<_> = coming_named
        .iter()
        .map(|it| it.netns.path.clone())
        .collect();
    eventually("only what stays is known", PATIENCE, || {
        let known = bench.known();
        ensure!(known == (uids.clone(), paths.clone(), STAY), "{known:?}");
        anyhow::Ok(())
    })
    .unwrap();
    for pod in &going {
        assert_eq!(
            pod.traces().unwrap(),
            Vec::<String>::new(),
            "{}",
            pod.spec.name
        );
    }
    for pod in coming.iter().step_by(16) {
        bench.node.until_whole(&pod.spec).unwrap();
    }
    // As many pods stand as did.
    eventually("no descriptor is left over", PATIENCE, || {
        let now = bench.descriptors();
        ensure!(now == before, "{now:?}, before {before:?}");
        anyhow::Ok(())
    })
    .unwrap();
}

#[test]
fn a_del_ends_an_add_that_waits_for_its_turn_at_once() {
    let node = Node::new().unwrap();
    let behind = node.run_dir().with_file_name("behind");
    let proxy = Proxy::start(&node.run_dir(), &behind).unwrap();
    for service in ["netconfig", "ztunnel-broker"] {
        node.start_at(&behind, service, &["--peer", "uid"]).unwrap();
    }
    node.start_with("pod-events", &["--peer", "uid", "--max-adds", "1"])
        .unwrap();
    node.start_ztunnel(&[]).unwrap();
    node.ready().unwrap();
    let (works, waits) = (
        node.sandbox(Spec::new("works").ambient()).unwrap(),
        node.sandbox(Spec::new("waits").ambient()).unwrap(),
    );
    let bench = Bench::over(node);
    let held = proxy.hold(Step {
        method: "ClaimNetns",
        moment: Moment::Before,
    });
    let first = bench.verbs.add(&Named::of(&works), PLUGIN);
    held.reached().unwrap();
    let second = bench.verbs.add(&Named::of(&waits), PLUGIN);
    bench.until("adds_waiting", 1.0);

    let dels = bench
        .verbs
        .answers(vec![bench.verbs.del(&Named::of(&waits))])
        .unwrap();
    assert!(
        dels[0].result.is_ok() && dels[0].took < Duration::from_secs(1),
        "{dels:?}"
    );
    let refused = bench
        .verbs
        .answers(vec![second])
        .unwrap()
        .remove(0)
        .result
        .unwrap_err();
    assert_eq!(refused.reason, Reason::SandboxNotCurrent, "{refused}");
    bench.until("adds_waiting", 0.0);
    assert_eq!(waits.traces().unwrap(), Vec::<String>::new());
    held.release();
    assert!(bench.verbs.answers(vec![first]).unwrap()[0].result.is_ok());
    let (uids, paths, records) = bench.known();
    assert_eq!((uids.len(), paths.len(), records), (1, 1, 1));
}

#[test]
fn a_del_ends_an_add_that_waits_for_a_ztunnel_and_its_undoing_is_awaited() {
    let bench = Bench::without_ztunnel();
    let pod = bench.node.sandbox(Spec::new("a").ambient()).unwrap();
    let add = bench.verbs.add(&Named::of(&pod), PLUGIN);
    eventually("the netns is claimed", PATIENCE, || {
        let claims = bench.node.api().claims()?;
        ensure!(claims.len() == 1, "{claims:?}");
        anyhow::Ok(())
    })
    .unwrap();
    let dels = bench
        .verbs
        .answers(vec![bench.verbs.del(&Named::of(&pod))])
        .unwrap();
    // Undone when the DEL is answered, not some time after.
    let (uids, paths, records) = bench.known();
    assert_eq!((uids.len(), paths.len(), records), (0, 0, 0));
    assert!(
        dels[0].result.is_ok() && dels[0].took < Duration::from_secs(2),
        "{dels:?}"
    );
    let refused = bench
        .verbs
        .answers(vec![add])
        .unwrap()
        .remove(0)
        .result
        .unwrap_err();
    assert_eq!(refused.reason, Reason::SandboxNotCurrent, "{refused}");
}

#[test]
fn while_100_adds_wait_for_a_ztunnel_nobody_else_waits_and_they_succeed_when_it_comes() {
    let bench = Bench::without_ztunnel();
    let outside = unreal(&bench.node, &specs("outside", 1), 0);
    let pods = bench.node.sandboxes(ambient("w", 101)).unwrap();
    for pod in &pods {
        bench.node.until_known(&pod.spec).unwrap();
    }
    let (last, first) = pods.split_last().unwrap();
    let adds: Vec<_> = first
        .iter()
        .map(|pod| bench.verbs.add(&Named::of(pod), PLUGIN))
        .collect();
    let claimed = |count: usize| {
        eventually("all are claimed", PATIENCE, || {
            let claims = bench.node.api().claims()?.len();
            ensure!(claims == count, "{claims}");
            anyhow::Ok(())
        })
    };
    claimed(100).unwrap();
    bench.until("adds_worked_on", 0.0);
    // More wait than may be worked on at once; one more gets its turn, one outside needs none, a DEL neither.
    let one_more = bench.verbs.add(&Named::of(last), PLUGIN);
    claimed(101).unwrap();
    let none = bench
        .verbs
        .answers(vec![bench.verbs.add(&outside[0], PLUGIN)])
        .unwrap();
    let enrollment = none[0].result.as_ref().unwrap().enrollment();
    assert_eq!(enrollment, Enrollment::None);
    assert!(none[0].took < Duration::from_secs(1), "{none:?}");
    let dels = bench
        .verbs
        .answers(vec![bench.verbs.del(&outside[0])])
        .unwrap();
    assert!(
        dels[0].result.is_ok() && dels[0].took < Duration::from_secs(1),
        "{dels:?}"
    );

    bench.node.start_ztunnel(&[]).unwrap();
    let adds = bench.verbs.answers(adds).unwrap();
    assert_eq!(outcomes(&adds), [("ok".to_owned(), 100)].into());
    assert!(
        bench.verbs.answers(vec![one_more]).unwrap()[0]
            .result
            .is_ok()
    );
}
