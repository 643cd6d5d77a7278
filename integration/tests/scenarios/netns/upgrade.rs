//! One ztunnel takes over from another under clients' continuous connections: none fails if the new one is ready
//! before the old one stops. Also ztunnels that are killed or hang.

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use inpod_proto::ztunnelbroker::v1::WorkloadPhase;
use integration::clients::{Attempt, Clients, Tally, sources, tally};
use integration::{App, Node, Pod, SERVICES, Spec, TIMEOUT, eventually};
use nix::sys::signal::Signal;
use serde_json::Value;

const PORT: u16 = 8080;

/// Pods with a client, and each client's interval.
const PODS: usize = 50;
const PERIOD: Duration = Duration::from_millis(100);

/// Connections in about one second.
const SECOND: u64 = 500;

const OLD: &str = "ztunnel-old";
const NEW: &str = "ztunnel-new";
const NEXT: &str = "ztunnel-next";

/// The old ztunnel serves mesh pods; an application is outside.
struct Fleet {
    pods: Vec<Pod>,
    outsider: Pod,
    _app: App,
    node: Node,
}

impl Fleet {
    fn new(pods: usize) -> anyhow::Result<Self> {
        let node = Node::new()?;
        SERVICES.iter().try_for_each(|it| node.start(it))?;
        node.start_ztunnel_as(OLD, &[])?;
        node.ready()?;
        let spec = |index| Spec::new(&format!("web-{index}")).ambient();
        let pods = node.pods((0..pods).map(spec).collect())?;
        let outsider = node.sandbox(Spec::new("outsider"))?;
        Ok(Self {
            _app: App::start(&outsider.netns, PORT)?,
            pods,
            outsider,
            node,
        })
    }

    fn clients(&self, pods: &[Pod]) -> Clients {
        let to = SocketAddr::new(self.outsider.v4.into(), PORT);
        Clients::start(&pods.iter().collect::<Vec<_>>(), to, PERIOD)
    }

    /// Counts a ztunnel's pods, and asks if it is ready.
    fn state(&self, ztunnel: &str) -> anyhow::Result<(usize, bool)> {
        let state = self.node.ztunnel_state_of(ztunnel)?;
        let pods = state.get("pods").and_then(Value::as_array);
        let running = |pod: &&Value| pod.get("state").is_some_and(|state| state == "running");
        let running = pods.context("no pods")?.iter().filter(running).count();
        Ok((running, state.get("ready") == Some(&Value::Bool(true))))
    }

    fn until_ready(&self, ztunnel: &str, pods: usize) -> anyhow::Result<()> {
        eventually(&format!("{ztunnel} is ready"), TIMEOUT, || {
            let state = self.state(ztunnel)?;
            ensure!(state == (pods, true), "{state:?}");
            anyhow::Ok(())
        })
    }

    /// SIGSTOP keeps the ztunnel's sockets open.
    fn hang(&self, ztunnel: &str) -> anyhow::Result<()> {
        self.node.signal(ztunnel, Signal::SIGSTOP)?;
        let stat = format!("/proc/{}/stat", self.node.pid(ztunnel)?);
        eventually("it is stopped", TIMEOUT, || {
            let stat = std::fs::read_to_string(&stat)?;
            ensure!(stat.contains(") T "), "{stat}");
            anyhow::Ok(())
        })
    }

    /// Stops one ztunnel when the other is ready.
    fn roll(&self, from: &str, to: &str, pods: usize) -> anyhow::Result<()> {
        self.node.start_ztunnel_as(to, &[])?;
        self.until_ready(to, pods)?;
        self.node.stop(from, Signal::SIGTERM)
    }

    fn tally(&self, attempts: &[Attempt], ztunnels: &[&str]) -> anyhow::Result<Tally> {
        let logs = ztunnels.iter().map(|it| self.node.accesses_of(it));
        Ok(tally(attempts, &logs.collect::<Result<Vec<_>, _>>()?))
    }

    fn taken(&self, ztunnel: &str) -> anyhow::Result<BTreeSet<(String, SocketAddr)>> {
        Ok(sources(&self.node.accesses_of(ztunnel)?))
    }
}

fn failed(attempts: &[Attempt]) -> impl Iterator<Item = &Attempt> {
    attempts.iter().filter(|attempt| attempt.outcome.is_err())
}

/// Expects that none failed, each passed a ztunnel, and each ztunnel carried some.
fn assert_none_failed(tally: &Tally, attempts: &[Attempt]) {
    let first = failed(attempts).next();
    assert_eq!((tally.failed, tally.around), (0, 0), "{tally:?} {first:?}");
    assert!(tally.taken_by.iter().all(|taken| *taken > 0), "{tally:?}");
}

#[test]
fn rolled_forward_and_back_with_the_next_one_ready_first_no_new_connection_fails() {
    let fleet = Fleet::new(PODS).unwrap();
    let clients = fleet.clients(&fleet.pods);
    clients.make(SECOND).unwrap();
    fleet.roll(OLD, NEW, PODS).unwrap();
    clients.make(SECOND).unwrap();
    fleet.roll(NEW, NEXT, PODS).unwrap();
    clients.make(SECOND).unwrap();
    let attempts = clients.stop().unwrap();
    let tally = fleet.tally(&attempts, &[OLD, NEW, NEXT]).unwrap();
    assert_none_failed(&tally, &attempts);
}

#[test]
fn where_the_old_one_goes_first_the_clients_notice() {
    let fleet = Fleet::new(PODS).unwrap();
    let clients = fleet.clients(&fleet.pods);
    clients.make(SECOND / 2).unwrap();
    fleet.node.stop(OLD, Signal::SIGTERM).unwrap();
    clients.make(SECOND / 5).unwrap();
    fleet.node.start_ztunnel_as(NEW, &[]).unwrap();
    fleet.until_ready(NEW, PODS).unwrap();
    clients.make(SECOND / 2).unwrap();
    let attempts = clients.stop().unwrap();
    let tally = fleet.tally(&attempts, &[OLD, NEW]).unwrap();
    assert!(tally.failed > 50 && tally.around == 0, "{tally:?}");
    // The last attempts succeed again.
    let by_pod = |pod: &Pod| attempts.iter().rfind(|it| it.uid == pod.spec.uid);
    let last = fleet.pods.iter().filter_map(by_pod);
    assert_eq!(last.filter(|it| it.outcome.is_ok()).count(), PODS);
}

#[test]
fn a_new_one_that_is_killed_half_way_costs_only_what_it_had_taken() {
    let fleet = Fleet::new(PODS).unwrap();
    let clients = fleet.clients(&fleet.pods);
    clients.make(SECOND / 2).unwrap();
    let slowly = ["--fault", "ack-delay-ms=50"];
    fleet.node.start_ztunnel_as(NEW, &slowly).unwrap();
    eventually("it is half-way", TIMEOUT, || {
        let (pods, _) = fleet.state(NEW)?;
        ensure!(pods >= PODS / 2, "{pods}");
        anyhow::Ok(())
    })
    .unwrap();
    fleet.node.stop(NEW, Signal::SIGKILL).unwrap();
    let killed = Instant::now();
    let (pods, was_ready) = fleet.state(NEW).unwrap();
    assert!(pods < PODS && !was_ready, "{pods}");
    clients.make(SECOND).unwrap();
    fleet.roll(OLD, NEXT, PODS).unwrap();
    clients.make(SECOND / 2).unwrap();
    let attempts = clients.stop().unwrap();
    let tally = fleet.tally(&attempts, &[OLD, NEW, NEXT]).unwrap();
    assert_eq!(tally.around, 0, "{tally:?}");
    assert!(tally.taken_by.iter().all(|taken| *taken > 0), "{tally:?}");
    // Other ztunnels' connections continue; the killed one's backlog migrated to the old one.
    let others = [OLD, NEXT].map(|ztunnel| fleet.taken(ztunnel).unwrap());
    for attempt in failed(&attempts) {
        let from = (attempt.uid.clone(), attempt.from.unwrap());
        let by_others = others.iter().any(|taken| taken.contains(&from));
        assert!(attempt.at < killed && !by_others, "{attempt:?}");
    }
}

#[test]
fn a_silent_old_one_holds_up_neither_the_new_one_nor_an_add() {
    let fleet = Fleet::new(PODS).unwrap();
    let clients = fleet.clients(&fleet.pods);
    clients.make(SECOND / 2).unwrap();
    fleet.hang(OLD).unwrap();
    let silent = Instant::now();
    fleet.node.start_ztunnel_as(NEW, &[]).unwrap();
    fleet.until_ready(NEW, PODS).unwrap();
    let late = fleet.node.pod(Spec::new("late").ambient()).unwrap();
    fleet.node.stop(OLD, Signal::SIGKILL).unwrap();
    fleet.node.until_whole(&late.spec).unwrap();
    clients.make(SECOND).unwrap();
    let attempts = clients.stop().unwrap();
    let tally = fleet.tally(&attempts, &[OLD, NEW]).unwrap();
    assert_eq!(tally.around, 0, "{tally:?}");
    // Accepted connections are lost; the backlog migrated to the new one.
    let late = failed(&attempts).find(|attempt| attempt.at > silent);
    assert!(late.is_none(), "{tally:?} {late:?}");
}

// scenario: 57
#[test]
fn a_pod_whose_port_is_taken_is_refused_and_holds_up_no_rollout() {
    let fleet = Fleet::new(PODS).unwrap();
    let (taken, others) = fleet.pods.split_first().unwrap();
    fleet.node.stop(OLD, Signal::SIGKILL).unwrap();
    let squatter = App::start(&taken.netns, 15008).unwrap();
    fleet.node.start_ztunnel_as(NEW, &[]).unwrap();
    fleet.until_ready(NEW, PODS - 1).unwrap();
    let clients = fleet.clients(others);
    clients.make(SECOND / 2).unwrap();
    fleet.roll(NEW, NEXT, PODS - 1).unwrap();
    clients.make(SECOND / 2).unwrap();
    let attempts = clients.stop().unwrap();
    let tally = fleet.tally(&attempts, &[NEW, NEXT]).unwrap();
    assert_none_failed(&tally, &attempts);
    let workloads = fleet.node.api().workloads().unwrap().workloads;
    let states = workloads.iter().flat_map(|it| &it.states);
    let (refused, served): (Vec<_>, Vec<_>) =
        states.partition(|it| it.phase() == WorkloadPhase::Refused);
    assert!(!refused.is_empty());
    for it in refused {
        assert_eq!((&it.uid, it.acknowledged_at), (&taken.spec.uid, None));
    }
    assert!(served.iter().all(|it| it.acknowledged_at.is_some()));

    drop(squatter);
    eventually("it is served", 2 * TIMEOUT, || {
        let state = fleet.state(NEXT)?;
        ensure!(state == (PODS, true), "{state:?}");
        anyhow::Ok(())
    })
    .unwrap();
}
