//! Limits of what an ADD, a DEL and a node at rest cost, in counts that do not depend on the machine.
//!
//! [`LIMITS`] are the limits: raising one needs a sentence there. `integration/bench` measures what it takes in time.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::ensure;
use integration::{Call, Inhabitant, Node, Pod, SERVICES, Spec, TIMEOUT, eventually};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// Per count.
const SAMPLES: u32 = 20;
/// On a node at rest, and on the fuller of two nodes.
const PODS: u32 = 100;
/// The most by which a count of an ADD may grow with [`PODS`] pods.
const GROWTH: f64 = 1.1;
/// Longer than the shortest timer that is due regularly.
const REST: Duration = Duration::from_secs(15);

/// A count, the most that it may be, and why it is not less.
#[rustfmt::skip]
const LIMITS: &[(&str, f64, &str)] = &[
    ("ADD, netns_visits", 1.0, "to verify the netns, and to open what is needed in it"),
    ("ADD, netlink_requests", 19.0, "one look before the change, its generation after, and ztunnel's listeners by TCP and UDP"),
    ("ADD, process_walks", 0.0, "no step may grow with the node's processes"),
    ("ADD, conntrack_dumps", 0.0, "no step may grow with the node's connections"),
    ("ADD, calls", 3.0, "ClaimNetns, AddWorkload, ApplyRules"),
    ("ADD, wake-ups", 60.0, "of three services that call each other one after another"),
    ("ADD, system calls", 300.0, "of the three services"),
    ("DEL, netns_visits", 0.0, "nothing has to be done in a netns that ends"),
    ("DEL, netlink_requests", 4.0, "the pod's addresses leave the probe set"),
    ("DEL, process_walks", 0.0, "no step may grow with the node's processes"),
    ("DEL, conntrack_dumps", 0.0, "no step may grow with the node's connections"),
    ("DEL, calls", 2.0, "RemoveWorkload, ReleaseNetns"),
    ("DEL, wake-ups", 40.0, "of the three services"),
    ("DEL, system calls", 120.0, "of the three services"),
    ("a minute at rest, wake-ups", 300.0, "each service reads its leave file and sweeps every 5 s; listeners are checked"),
    ("a minute at rest, process_walks", 0.0, "nobody asks for processes"),
    ("a pod, KiB of anonymous memory", 50.0, "of unoptimised programs, whose tasks are larger"),
];

/// Counted by strace.
const SYSTEM_CALLS: &str = "system calls";

fn check(count: &str, found: f64) {
    let limit = LIMITS.iter().find(|(name, ..)| *name == count);
    let (_, limit, why) = limit.unwrap_or_else(|| unreachable!("{count} has no limit"));
    eprintln!("  {count}: {found:.1} of {limit}");
    // The scheduler has a share in wake-ups.
    let is_left_out = count.ends_with("wake-ups") && std::env::var_os("INTEGRATION_FULL").is_none();
    assert!(
        is_left_out || found <= *limit,
        "{count}: {found:.1}, at most {limit} ({why})"
    );
}

/// Starts the services with the chart's settings.
fn node() -> Node {
    let node = Node::new().unwrap();
    for service in SERVICES {
        let mut settings = vec!["--peer", "uid", "--log-level", "info"];
        match service {
            "pod-events" => settings.extend(["--dns-capture", "true"]),
            // Reads by the clock are spread over the period, some of them over this test.
            "netconfig" => settings.extend(["--verify-seconds", "3600"]),
            _ => {}
        }
        node.start_with(service, &settings).unwrap();
    }
    node.start_ztunnel(&[]).unwrap();
    node.ready().unwrap();
    node
}

fn specs(name: &str, count: u32) -> Vec<Spec> {
    let spec = |number| Spec::new(&format!("{name}-{number}")).ambient();
    (0..count).map(spec).collect()
}

/// Lets the source know of pods without an ADD.
fn sandboxes(node: &Node, name: &str) -> Vec<Pod> {
    let pods = node.sandboxes(specs(name, SAMPLES)).unwrap();
    for pod in &pods {
        node.until_known(&pod.spec).unwrap();
        // Each change of a route is one to look at.
        pod.until_addresses_are_checked().unwrap();
    }
    pods
}

/// Marks pods as terminating, as the API server does before the kubelet ends their containers.
fn terminate(node: &Node, pods: &[Pod]) {
    for pod in pods {
        let manifest = pod.spec.manifest(node.name());
        let deleted = "metadata:\n  deletionTimestamp: \"2026-01-01T00:00:00Z\"\n";
        let manifest = manifest.replacen("metadata:\n", deleted, 1);
        assert!(manifest.contains("deletionTimestamp"), "{manifest}");
        let name = format!("{}-{}.yaml", pod.spec.namespace, pod.spec.name);
        fs::write(node.manifests().join(name), manifest).unwrap();
    }
    // Files are read in order, and this one last.
    let last = Spec::new("zz-last");
    node.write_manifest(&last).unwrap();
    node.until_known(&last).unwrap();
}

type Verb = fn(&Pod, &Path, &Path) -> Call;

fn call(node: &Node, verb: Verb, pods: &[Pod]) {
    for pod in pods {
        let outcome = node.call(verb, pod).run().unwrap();
        assert_eq!(outcome.code, 0, "{outcome:?}");
    }
}

/// Numbers since the services' start.
fn counts(node: &Node) -> BTreeMap<String, f64> {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let mut counts = BTreeMap::<String, f64>::new();
    for service in SERVICES {
        let socket = inpod_service::socket(&node.run_dir(), service);
        let text = runtime
            .block_on(inpod_service::metrics::fetch(&socket))
            .unwrap();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (name, value) = line.rsplit_once(' ').unwrap();
            let value: f64 = value.parse().unwrap_or_default();
            if let Some(cost) = name.strip_prefix("inpod_netconfig_") {
                counts.insert(cost.to_owned(), value);
            }
            let is_call = name.contains("grpc_requests_total")
                && ["NetconfigService/", "ZtunnelBrokerService/"]
                    .iter()
                    .any(|service| name.contains(service));
            if is_call {
                *counts.entry("calls".to_owned()).or_default() += value;
            }
        }
        counts.extend(wakeups(node.pid(service).unwrap()));
    }
    counts
}

/// Times that each thread of a process waited (voluntary context switches). Threads come and go.
fn wakeups(pid: u32) -> Vec<(String, f64)> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let of_task = |task: fs::DirEntry| {
        let status = fs::read_to_string(task.path().join("status")).ok()?;
        let mut lines = status.lines();
        let line = lines.find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
        let name = format!("wake-ups of {}", task.file_name().display());
        Some((name, line.trim().parse().ok()?))
    };
    tasks.flatten().filter_map(of_task).collect()
}

/// Returns what `work` cost, by the names in [`LIMITS`] after `kind`.
fn cost(node: &Node, kind: &str, work: impl FnOnce()) -> Vec<(&'static str, f64)> {
    let before = counts(node);
    work();
    let after = counts(node);
    let mut costs = Vec::new();
    for (name, ..) in LIMITS {
        let counted = name
            .strip_prefix(kind)
            .and_then(|name| name.strip_prefix(", "));
        let Some(counted) = counted.filter(|name| *name != SYSTEM_CALLS) else {
            continue;
        };
        let since = |(name, now): (&String, &f64)| now - before.get(name).copied().unwrap_or(0.0);
        let found = after.iter().filter(|(name, _)| name.starts_with(counted));
        let found: Vec<f64> = found.map(since).collect();
        assert!(!found.is_empty(), "nothing is counted as {counted}");
        costs.push((*name, found.iter().sum()));
    }
    costs
}

/// Returns the median of each cost, since a notification of the kernel may cause a look during a call; for what must
/// never happen, the sum.
fn costs(
    node: &Node,
    kind: &str,
    verb: Verb,
    pods: &[Pod],
) -> impl Iterator<Item = (&'static str, f64)> {
    let mut all = BTreeMap::<_, Vec<f64>>::new();
    for pod in pods {
        let costs = cost(node, kind, || call(node, verb, std::slice::from_ref(pod)));
        for (name, found) in costs {
            all.entry(name).or_default().push(found);
        }
    }
    all.into_iter().map(|(name, mut found)| {
        found.sort_by(f64::total_cmp);
        let never = ["process_walks", "conntrack_dumps"];
        if never.iter().any(|never| name.ends_with(never)) {
            (name, found.iter().sum())
        } else {
            (name, *found.get(found.len() / 2).unwrap())
        }
    })
}

fn check_calls(node: &Node, kind: &str, verb: Verb, pods: &[Pod]) {
    costs(node, kind, verb, pods).for_each(|(name, found)| check(name, found));
}

#[test]
fn an_add_and_a_del_cost_no_more_than_their_limits() {
    let node = node();
    // The first of their kind cost more.
    let first = node.pod(Spec::new("first").ambient()).unwrap();
    node.until_whole(&first.spec).unwrap();
    let pods = sandboxes(&node, "web");
    check_calls(&node, "ADD", Call::add, &pods);
    terminate(&node, &pods);
    check_calls(&node, "DEL", Call::del, &pods);
    assert_eq!(node.api().claims().unwrap().len(), 1);
}

/// Counts the services' system calls during `work`.
fn system_calls(node: &Node, work: impl FnOnce()) -> f64 {
    let output = node.run_dir().join("strace");
    let pids = SERVICES.map(|service| format!("--attach={}", node.pid(service).unwrap()));
    let mut strace = Command::new("strace")
        .args(["-f", "-c", "-o"])
        .arg(&output)
        .args(pids)
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    eventually("strace has attached to each thread", TIMEOUT, || {
        let mut pids = SERVICES
            .map(|service| node.pid(service).unwrap())
            .into_iter();
        ensure!(pids.all(|pid| is_traced_by(pid, strace.id())), "it has not");
        anyhow::Ok(())
    })
    .unwrap();
    work();
    let pid = Pid::from_raw(strace.id().try_into().unwrap());
    kill(pid, Signal::SIGINT).unwrap();
    strace.wait().unwrap();
    let summary = fs::read_to_string(output).unwrap();
    let total = summary
        .lines()
        .find(|line| line.ends_with(" total"))
        .unwrap();
    let found = total.split_whitespace().nth(3).unwrap().parse().unwrap();
    assert!(found > f64::from(SAMPLES), "{summary}");
    found
}

fn is_traced_by(pid: u32, tracer: u32) -> bool {
    let mut threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let line = format!("\nTracerPid:\t{tracer}\n");
    threads.all(|thread| {
        let status = fs::read_to_string(thread.path().join("status"));
        status.is_ok_and(|text| text.contains(&line))
    })
}

/// Needs strace.
#[test]
fn an_add_and_a_del_make_no_more_system_calls_than_their_limits() {
    let node = node();
    let first = node.pod(Spec::new("first").ambient()).unwrap();
    node.until_whole(&first.spec).unwrap();
    let pods = sandboxes(&node, "web");
    let found = system_calls(&node, || call(&node, Call::add, &pods));
    check("ADD, system calls", found / f64::from(SAMPLES));
    terminate(&node, &pods);
    let found = system_calls(&node, || call(&node, Call::del, &pods));
    check("DEL, system calls", found / f64::from(SAMPLES));
}

/// Needs strace.
#[test]
fn an_add_beside_many_pods_costs_what_it_costs_beside_one() {
    let node = node();
    let first = node.pod(Spec::new("first").ambient()).unwrap();
    node.until_whole(&first.spec).unwrap();
    let measure = |name| {
        let pods = sandboxes(&node, name);
        let (counted, traced) = pods.split_at(pods.len() / 2);
        let mut found: BTreeMap<_, _> = costs(&node, "ADD", Call::add, counted).collect();
        // The scheduler has a share in wake-ups.
        found.remove("ADD, wake-ups");
        let calls = system_calls(&node, || call(&node, Call::add, traced));
        found.insert("ADD, system calls", calls);
        found
    };
    let beside_few = measure("few");
    let filling = node.pods(specs("filling", PODS)).unwrap();
    for pod in &filling {
        node.until_whole(&pod.spec).unwrap();
    }
    let beside_many = measure("many");
    eprintln!("{beside_few:?} beside one pod, {beside_many:?} beside {PODS}");
    for (name, few) in beside_few {
        assert!(beside_many[name] <= few * GROWTH, "{name}");
    }
}

#[test]
fn a_node_at_rest_costs_no_more_than_its_limits() {
    if !integration::is_full_run() {
        return;
    }
    let node = node();
    let anonymous = || {
        let all = SERVICES.map(|service| node.anonymous(service).unwrap());
        f64::from(u32::try_from(all.iter().sum::<u64>()).unwrap())
    };
    let first = node.pod(Spec::new("first").ambient()).unwrap();
    node.until_whole(&first.spec).unwrap();
    let before = anonymous();
    let pods = node.pods(specs("web", PODS)).unwrap();
    let _inhabitants: Vec<_> = pods
        .iter()
        .map(|pod| Inhabitant::of(pod).unwrap())
        .collect();
    pods.iter()
        .for_each(|pod| drop(node.until_whole(&pod.spec).unwrap()));
    check(
        "a pod, KiB of anonymous memory",
        (anonymous() - before) / f64::from(PODS),
    );
    // Until the work that follows an ADD has ended; the first check of a pod's path follows within 25 s.
    thread::sleep(REST * 2);
    let minutes = REST.as_secs_f64() / 60.0;
    for (name, found) in cost(&node, "a minute at rest", || thread::sleep(REST)) {
        check(name, found / minutes);
    }
}
