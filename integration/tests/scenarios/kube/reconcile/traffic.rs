//! Clients and probes connect continuously while a pod joins and leaves repeatedly.

use std::{
    net::IpAddr,
    time::{Duration, Instant},
};

use inpod_types::keys;
use integration::{Access, App};
use serde_json::{Value, json};

use super::*;
use integration::clients::{Attempt, Clients};

/// Between two connections of one client.
pub(super) const PERIOD: Duration = Duration::from_millis(20);

pub(super) const ROUNDS: usize = 4;

/// So long before a change, a new connection has sent its first packet.
const MARGIN: Duration = Duration::from_millis(250);

/// Node probes' sources at an application in the mesh.
const PROBE_SOURCES: [&str; 2] = ["169.254.7.127", "fd16:9254:7127:1337:ffff:ffff:ffff:ffff"];

/// The sources that it sees otherwise.
const NODE_SOURCES: [&str; 2] = ["10.77.0.1", "fd77::1"];

#[derive(Clone, Copy, Debug)]
pub(super) struct Span(pub(super) Instant, pub(super) Instant);

impl Span {
    fn holds(&self, at: Instant) -> bool {
        self.0 < at && at + MARGIN < self.1
    }
}

/// When the pod was completely inside, completely outside, and joining.
#[derive(Default)]
pub(super) struct Times {
    inside: Vec<Span>,
    outside: Vec<Span>,
    pub(super) joining: Vec<Span>,
}

impl Times {
    pub(super) fn is_inside(&self, at: Instant) -> bool {
        self.inside.iter().any(|span| span.holds(at))
    }

    /// Returns seconds to the nearest change, and the state then.
    fn around(&self, at: Instant) -> Option<(f64, &'static str)> {
        let changes = self
            .inside
            .iter()
            .flat_map(|it| [(it.0, "in"), (it.1, "leave")]);
        let asked = self.joining.iter().map(|it| (it.0, "join"));
        let outside = self.outside.iter().map(|it| (it.0, "out"));
        let all = changes.chain(asked).chain(outside);
        let since = |to: Instant| {
            at.checked_duration_since(to).map_or_else(
                || -to.duration_since(at).as_secs_f64(),
                |it| it.as_secs_f64(),
            )
        };
        let all = all.map(|(to, what)| (since(to), what));
        all.min_by(|one, other| one.0.abs().total_cmp(&other.0.abs()))
    }

    /// Asked to leave, and still in the mesh.
    pub(super) fn is_leaving(&self, at: Instant) -> bool {
        let mut left = self.inside.iter().zip(self.outside.iter().skip(1));
        left.any(|(inside, outside)| inside.1 < at && at < outside.0)
    }

    pub(super) fn is_outside(&self, at: Instant) -> bool {
        self.outside.iter().any(|span| span.holds(at))
    }
}

/// Waits for the annotation that informs peers.
fn until_announced(cluster: &Cluster, pod: &Pod) {
    eventually("peers are informed", TIMEOUT, || {
        let object = cluster.server.get(&cluster.path(&pod.spec.name))?;
        let found = object.pointer("/metadata/annotations/ambient.istio.io~1redirection");
        ensure!(found == Some(&json!("enabled")), "it bears {found:?}");
        anyhow::Ok(())
    })
    .unwrap();
}

/// Joins and leaves; `wait` runs inside the mesh.
pub(super) fn toggle(cluster: &Cluster, pod: &Pod, wait: impl Fn()) -> Times {
    let mut times = Times::default();
    let mut out = Instant::now();
    wait();
    for _ in 0..ROUNDS {
        let asked = Instant::now();
        times.outside.push(Span(out, asked));
        label(cluster, &pod.spec.name, &json!("ambient"));
        until_announced(cluster, pod);
        let joined = Instant::now();
        until_in(cluster, pod, Reason::LabelOnPod);
        times.joining.push(Span(asked, joined));
        wait();
        times.inside.push(Span(joined, Instant::now()));
        label(cluster, &pod.spec.name, &Value::Null);
        until_out(cluster, pod, Reason::NotSelected);
        out = Instant::now();
        wait();
    }
    times.outside.push(Span(out, Instant::now()));
    times
}

fn is_captured(attempt: &Attempt, log: &[Access], listener: u64) -> bool {
    let mut accepted = log
        .iter()
        .filter(|access| access.event == "accepted" && access.listener == listener);
    accepted.any(|access| access.source == attempt.from)
}

/// If attempts shared a port, the log does not show which was captured.
fn had_a_port_of_its_own(attempt: &Attempt, attempts: &[Attempt]) -> bool {
    let same = attempts.iter().filter(|other| other.from == attempt.from);
    same.count() == 1
}

/// Every connection was captured inside and none outside.
pub(super) fn assert_captured_inside(
    attempts: &[Attempt],
    log: &[Access],
    listener: u64,
    times: &Times,
) {
    let of = |is_meant: &dyn Fn(Instant) -> bool| {
        let meant = attempts.iter().filter(|it| is_meant(it.at));
        let meant = meant.filter(|it| had_a_port_of_its_own(it, attempts));
        let (captured, direct): (Vec<_>, Vec<_>) =
            meant.partition(|it| is_captured(it, log, listener));
        (captured.len(), direct.len())
    };
    let (inside, bypassed) = of(&|at| times.is_inside(at));
    let (taken, outside) = of(&|at| times.is_outside(at));
    assert!(
        inside > 20 && outside > 20 && bypassed == 0 && taken == 0,
        "inside {inside}, past ztunnel {bypassed}, outside {outside}, captured there {taken}"
    );
}

pub(super) fn assert_none_failed(attempts: &[Attempt], times: &Times) {
    let failed = attempts.iter().find(|it| it.outcome.is_err());
    let when = failed.map(|failed| times.around(failed.at));
    assert!(
        failed.is_none(),
        "of {}: {failed:?} {when:?}",
        attempts.len()
    );
}

/// Returns a pod outside the mesh with an application, and a netns of no pod.
pub(super) fn pair(annotations: &Value) -> (Cluster, Pod, Pod, [App; 2]) {
    let cluster = Cluster::shared();
    let allowed = json!({"metadata": {"annotations": {keys::ALLOW: keys::ALLOW_KEEP_EXISTING}}});
    let namespace = format!("/api/v1/namespaces/{}", cluster.namespace);
    cluster.server.patch(&namespace, &allowed).unwrap();
    let mut object = cluster.object("web", None);
    object["metadata"]["annotations"] = annotations.clone();
    object["spec"]["containers"][0]["readinessProbe"] = json!({"tcpSocket": {"port": PORT}});
    let web = cluster.sandbox("web", &cluster.create(&object));
    cluster.node.add(&web).unwrap();
    let outsider = outsider(&cluster);
    let apps = [&web, &outsider].map(|pod| App::start(&pod.netns, PORT).unwrap());
    (cluster, web, outsider, apps)
}

/// Connections, and the listener that accepts them in the mesh.
type Taken = (Vec<Attempt>, u64);

/// Returns all outcomes to and from the pod while it joined and left, each group with its listener.
fn around_a_pod(annotations: &Value) -> (Times, Vec<Access>, Vec<Taken>) {
    let (cluster, web, outsider, _apps) = pair(annotations);
    let towards =
        |from: &Pod, to: IpAddr| Clients::start(&[from], SocketAddr::new(to, PORT), PERIOD);
    let inbound = web.addresses().map(|to| (towards(&outsider, to), 15006));
    let outbound = outsider.addresses().map(|to| (towards(&web, to), 15001));
    let all: Vec<_> = inbound.into_iter().chain(outbound).collect();
    let wait = || {
        let mut all = all.iter();
        all.try_for_each(|(clients, _)| clients.make(40)).unwrap();
    };
    let times = toggle(&cluster, &web, wait);
    let ended = all
        .into_iter()
        .map(|(clients, listener)| (clients.stop().unwrap(), listener));
    let ended = ended.collect();
    (times, cluster.node.accesses().unwrap(), ended)
}

// scenario: 6
#[test]
fn while_a_running_pod_joins_and_leaves_again_and_again_no_client_is_refused() {
    let (times, log, all) = around_a_pod(&json!({}));
    for (attempts, listener) in all {
        assert_none_failed(&attempts, &times);
        assert_captured_inside(&attempts, &log, listener, &times);
    }
}

// scenario: 6
#[test]
fn where_connections_from_before_go_on_a_running_pod_joins_and_leaves_and_none_fails() {
    let (times, log, all) = around_a_pod(&json!({keys::KEEP_EXISTING_CONNECTIONS: "true"}));
    for (attempts, listener) in all {
        assert_none_failed(&attempts, &times);
        assert_captured_inside(&attempts, &log, listener, &times);
    }
}

/// The node's probes while a pod joins and leaves, per address: none is captured, each has the right source.
fn probes_around_a_pod(annotations: &Value) -> (Times, Vec<Vec<Attempt>>) {
    let (cluster, web, _outsider, _apps) = pair(annotations);
    let node = [("node", cluster.node.netns().path())];
    let probes = web
        .addresses()
        .map(|to| Clients::start_in(&node, SocketAddr::new(to, PORT), PERIOD));
    let wait = || {
        let mut all = probes.iter();
        all.try_for_each(|clients| clients.make(40)).unwrap();
    };
    let times = toggle(&cluster, &web, wait);
    let log = cluster.node.accesses().unwrap();
    let probes = probes.map(|clients| clients.stop().unwrap());
    let is_one_of = |source: IpAddr, all: [&str; 2]| all.contains(&source.to_string().as_str());
    for attempts in &probes {
        let (mut inside, mut outside) = (0, 0);
        for attempt in attempts {
            let Ok(seen) = attempt.outcome.clone() else {
                continue;
            };
            if times.is_inside(attempt.at) {
                assert!(is_one_of(seen, PROBE_SOURCES), "{attempt:?}");
                inside += 1;
            } else if times.is_outside(attempt.at) {
                assert!(is_one_of(seen, NODE_SOURCES), "{attempt:?}");
                outside += 1;
            }
        }
        assert!(inside > 20 && outside > 20, "{inside} and {outside}");
    }
    let known = |access: &&Access| {
        let source = access.source.map(|source| source.ip());
        access.listener == 15006
            && source.is_some_and(|it| is_one_of(it, PROBE_SOURCES) || is_one_of(it, NODE_SOURCES))
    };
    assert_eq!(log.iter().find(known), None);
    (times, probes.into())
}

// scenario: 6
#[test]
fn while_a_running_pod_joins_and_leaves_again_and_again_no_probe_is_refused_or_captured() {
    let (times, all) = probes_around_a_pod(&json!({}));
    for attempts in all {
        assert_none_failed(&attempts, &times);
    }
}

// scenario: 6
#[test]
fn where_connections_from_before_go_on_no_probe_of_a_pod_that_joins_and_leaves_fails() {
    let (times, all) = probes_around_a_pod(&json!({keys::KEEP_EXISTING_CONNECTIONS: "true"}));
    for attempts in all {
        assert_none_failed(&attempts, &times);
    }
}
