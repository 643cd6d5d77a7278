//! repair calls pod-events from another pod. The policy (deploy/docs/install.md, "Combined or split") treats every
//! root process that can open the socket as a service; the calls that this allows change nothing.

use std::{fs, path::Path};

use inpod_proto::{Class, class_of};
use integration::{
    Cgroups, Node, Pod, Spec, TIMEOUT, bin, eventually, methods, not_run_alone, run,
};
use nix::sys::signal::Signal;

/// UIDs of repair's pod and pod-events'.
const REPAIR: &str = "11111111-2222-3333-4444-555555555555";
const POD_EVENTS: &str = "99999999-2222-3333-4444-555555555555";

/// Returns each call of pod-events with its class.
fn calls() -> Vec<(String, Class)> {
    let class = |call: String| (call.clone(), class_of(&call).unwrap());
    methods("pod-events").into_iter().map(class).collect()
}

#[test]
fn no_call_of_pod_events_is_for_services_alone() {
    let calls = calls();
    assert!(calls.len() >= 9, "{calls:?}");
    for (call, class) in calls {
        assert_ne!(class, Class::Service, "{call}");
    }
}

fn nowhere(node: &Node) -> String {
    let path = node.run_dir().with_file_name("kubeconfig-of-nobody");
    let cluster = "{server: 'http://127.0.0.1:1'}";
    let config = format!(
        "{{apiVersion: v1, kind: Config, current-context: it, contexts: [{{name: it, context: {{cluster: it, user: it}}}}], \
         clusters: [{{name: it, cluster: {cluster}}}], users: [{{name: it, user: {{token: it}}}}]}}"
    );
    fs::write(&path, config).unwrap();
    path.display().to_string()
}

/// pod-events in a pod with its own cgroup namespace, under a policy; repair in another, unprivileged, with
/// its own pid namespace.
fn start(cgroups: &Cgroups, policy: &str) -> Node {
    let node = Node::new().unwrap();
    let within = |uid: &str, more: &[&str], service: &str, settings: &[&str]| {
        let container = cgroups.container(uid, "", "+all").unwrap();
        let words: Vec<_> = container
            .iter()
            .map(String::as_str)
            .chain(more.iter().copied())
            .collect();
        node.start_within(&words, &node.run_dir(), service, settings)
            .unwrap();
    };
    within(
        POD_EVENTS,
        &["unshare", "--cgroup"],
        "pod-events",
        &["--peer", policy],
    );
    eventually("pod-events serves", TIMEOUT, || node.api().status()).unwrap();
    let own_pids = [
        "unshare",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "setpriv",
        "--bounding-set=-all",
    ];
    let kubeconfig = nowhere(&node);
    let settings = [
        "--peer",
        "uid",
        "--node-name",
        node.name(),
        "--kubeconfig",
        &kubeconfig,
    ];
    within(REPAIR, &own_pids, "repair", &settings);
    node
}

/// Reads repair's metrics, as a host process may.
fn is_connected(node: &Node) -> anyhow::Result<bool> {
    let socket = inpod_service::socket(&node.run_dir(), "repair");
    let words = [
        "-sSf",
        "--unix-socket",
        socket.to_str().unwrap(),
        "http://localhost/metrics",
    ];
    let text = run("curl", &words)?;
    let series = "inpod_repair_condition{name=\"pod-events\"} ";
    let mut reported = text.lines().filter_map(|line| line.strip_prefix(series));
    Ok(reported
        .next()
        .ok_or_else(|| anyhow::anyhow!("not told yet"))?
        == "1")
}

/// Returns the answer to a root process of repair's pod.
fn answer(node: &Node, cgroup: &Path, pod: &Pod, call: &str) -> String {
    let socket = inpod_service::socket(&node.run_dir(), "pod-events");
    let (impostor, socket) = (bin("impostor").unwrap(), socket.display());
    let script = format!(
        "echo $$ > {}/cgroup.procs && exec unshare --mount --pid --fork --mount-proc nsenter --net={} \
         timeout 2 {} call {socket} {call}",
        cgroup.display(),
        pod.path().display(),
        impostor.display()
    );
    // A stream that is allowed lasts until the time is over.
    run("sh", &["-c", &script]).unwrap_or_else(|error| error.to_string())
}

#[test]
fn repair_in_another_pod_is_answered_what_changes_nothing_and_only_where_the_policy_lets_it() {
    let made = Cgroups::new().and_then(|cgroups| Ok((cgroups.pod(REPAIR)?, cgroups)));
    let (cgroup, cgroups) = match made {
        Ok(made) => made,
        Err(error) => return not_run_alone(format!("it cannot make a cgroup: {error:#}")),
    };
    // The chart's value, and one that admits no process.
    for (policy, lets) in [("cgroup:/..", true), ("cgroup:/nobody", false)] {
        let node = start(&cgroups, policy);
        eventually("repair hears it or not", TIMEOUT, || {
            let hears = is_connected(&node)?;
            anyhow::ensure!(hears == lets, "{policy}: {hears}");
            anyhow::Ok(())
        })
        .unwrap();
        node.stop("repair", Signal::SIGKILL).unwrap();
        let pod = node.sandbox(Spec::new("any")).unwrap();
        for (call, class) in calls() {
            let said = answer(&node, &cgroup, &pod, &call);
            let is_answered = !said.contains("CALLER_REFUSED");
            assert_eq!(
                is_answered,
                lets && class == Class::Read,
                "{policy} {call}: {said}"
            );
        }
        node.stop("pod-events", Signal::SIGTERM).unwrap();
    }
}
