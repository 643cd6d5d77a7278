//! Advances a run: ends faults, follows pods and ztunnels, and judges traffic.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use fastrand::Rng;
use inpod_proto::podevents::v1::{ListPodsRequest, PodState, PodSummary};
use integration::Api;
use nix::sys::signal::Signal;
use serde_json::json;
use tokio::runtime::Runtime;

use crate::common::cluster::Cluster;
use crate::kube::alone::chaos::{
    figures::Figures,
    oracle::{Oracle, Promise, Record, Span, Way},
    subject::{Answered, Subject, wanted},
    traffic::Outside,
    ztunnels::{DRAINED, Ztunnel},
};

/// A record is judged when everything about its time is known.
const JUDGED_AFTER: Duration = Duration::from_millis(1500);

/// A run with so many violations ends.
const MAX_VIOLATIONS: usize = 20;

pub(crate) const API_SERVER: &str = "api-server";

/// Until when something is down.
#[derive(Debug)]
pub(crate) struct Down {
    pub(crate) until: Instant,
    /// SIGCONT continues it; otherwise it is started.
    pub(crate) hangs: bool,
}

/// A report of pod-events, and the time of the question.
pub(crate) struct Seen {
    asked: Instant,
    at: Instant,
    pods: Vec<PodSummary>,
}

/// Asks pod-events for its pods, again and again.
struct Observer {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Observer {
    fn start(api: Api, sink: Sender<Seen>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                let asked = Instant::now();
                // It may be down.
                if let Ok(pods) = api.list(ListPodsRequest::default()) {
                    let at = Instant::now();
                    sink.send(Seen { asked, at, pods }).unwrap_or_default();
                }
                thread::sleep(Duration::from_millis(200));
            }
        });
        Self {
            stop,
            thread: Some(thread),
        }
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap_or_default();
        }
    }
}

pub(crate) struct Chaos {
    pub(crate) rng: Rng,
    pub(crate) subjects: BTreeMap<String, Subject>,
    pub(crate) is_namespace_in: bool,
    /// The number of the newest sandbox.
    pub(crate) made: u32,
    /// Names of ended pods.
    pub(crate) names: (Sender<String>, Receiver<String>),
    pub(crate) down: BTreeMap<&'static str, Down>,
    pub(crate) ztunnels: Vec<Ztunnel>,
    pub(crate) ztunnels_started: u32,
    pub(crate) next_ztunnel: Option<Instant>,
    /// A ztunnel hangs until then.
    pub(crate) hung_ztunnel: Option<(String, Instant)>,
    pub(crate) done: BTreeMap<&'static str, u32>,
    /// Calls that run in the background.
    pub(crate) threads: Vec<JoinHandle<anyhow::Result<()>>>,
    pub(crate) restarting: Option<JoinHandle<anyhow::Result<()>>>,
    pub(crate) oracle: Oracle,
    pub(crate) figures: Figures,
    pub(crate) violations: Vec<String>,
    /// Direct connections after tears, and the latest after a repair could begin.
    pub(crate) escaped: (u32, Duration),
    judged_late: VecDeque<(Instant, Record)>,
    records: Receiver<Record>,
    pub(crate) sink: Sender<Record>,
    seen: Receiver<Seen>,
    _observer: Observer,
    pub(crate) outside: Arc<Outside>,
    pub(crate) cluster: Cluster,
    pub(crate) runtime: Runtime,
}

impl Chaos {
    pub(crate) fn new(seed: u64) -> anyhow::Result<Self> {
        let cluster = Cluster::on_own_server();
        cluster.label_namespace("ambient");
        for service in integration::SERVICES {
            cluster.node.start(service)?;
        }
        let first = Ztunnel::start(&cluster.node, 1)?;
        cluster.until_served();
        let runtime = Runtime::new()?;
        let (sink, records) = channel();
        let outside = cluster.sandbox("outside", "outside");
        let outside = Outside::start(runtime.handle(), &outside, sink.clone())?;
        let (observed, seen) = channel();
        let observer = Observer::start(Api::new(&cluster.node.run_dir())?, observed);
        let mut chaos = Self {
            rng: Rng::with_seed(seed),
            subjects: BTreeMap::new(),
            is_namespace_in: true,
            made: 0,
            names: channel(),
            down: BTreeMap::new(),
            ztunnels: vec![first],
            ztunnels_started: 1,
            next_ztunnel: None,
            hung_ztunnel: None,
            done: BTreeMap::new(),
            threads: Vec::new(),
            restarting: None,
            oracle: Oracle::default(),
            figures: Figures::new(Instant::now()),
            violations: Vec::new(),
            escaped: Default::default(),
            judged_late: VecDeque::new(),
            records,
            sink,
            seen,
            _observer: observer,
            outside: Arc::new(outside),
            cluster,
            runtime,
        };
        // The first keeps the namespace among those whose pods wait for the agent, the second shows when a label of
        // the namespace is known.
        for (name, mode) in [("resident", Some("ambient")), ("witness", None)] {
            chaos.create(name, mode, true)?;
        }
        chaos.pass_until("the fixed pods are enrolled", |chaos| {
            chaos.subjects.values().all(Subject::is_settled)
        })?;
        Ok(chaos)
    }

    /// Lets time pass until something is so.
    pub(crate) fn pass_until(
        &mut self,
        what: &str,
        is_so: impl Fn(&Self) -> bool,
    ) -> anyhow::Result<()> {
        let deadline = Instant::now() + crate::kube::alone::chaos::SETTLE_TIMEOUT;
        while !is_so(self) {
            anyhow::ensure!(Instant::now() < deadline, "not in time: {what}");
            self.pass(Duration::from_millis(50))?;
        }
        Ok(())
    }

    pub(crate) fn pass(&mut self, time: Duration) -> anyhow::Result<()> {
        thread::sleep(time);
        self.restart_due(Instant::now())?;
        self.reap()?;
        self.tend_ztunnels()?;
        self.hear()?;
        self.judge();
        Ok(())
    }

    pub(crate) fn is_over(&self) -> bool {
        self.violations.len() >= MAX_VIOLATIONS
    }

    pub(crate) fn note(&mut self, what: String) {
        self.figures.event(Instant::now(), what);
    }

    pub(crate) fn goes_down(&mut self, what: &str, how: &str) {
        let now = Instant::now();
        self.oracle.goes_down(what, now);
        self.figures.fault(lane(what), now, None);
        self.note(format!("{what}: {how}"));
    }

    pub(crate) fn comes_back(&mut self, what: &str) {
        let now = Instant::now();
        self.oracle.comes_back(what, now);
        self.figures.fault_ends(lane(what), now);
        self.note(format!("{what}: back"));
    }

    /// Restarts and continues what was down long enough.
    pub(crate) fn restart_due(&mut self, now: Instant) -> anyhow::Result<()> {
        let due = |_: &&str, down: &mut Down| down.until <= now;
        let back: Vec<_> = self.down.extract_if(.., due).collect();
        for (what, down) in back {
            let node = &self.cluster.node;
            match what {
                API_SERVER => self.cluster.server.signal(Signal::SIGCONT)?,
                hung if down.hangs => node.signal(hung, Signal::SIGCONT)?,
                service => node.start(service)?,
            }
            self.comes_back(what);
        }
        if self
            .restarting
            .as_ref()
            .is_some_and(JoinHandle::is_finished)
        {
            self.restarting.take().map_or(Ok(()), join)?;
            self.comes_back(API_SERVER);
        }
        if let Some((name, _)) = self.hung_ztunnel.take_if(|(_, until)| *until <= now) {
            self.cluster.node.signal(&name, Signal::SIGCONT)?;
            self.comes_back(&name);
        }
        if self.next_ztunnel.take_if(|at| *at <= now).is_some() {
            self.start_ztunnel()?;
        }
        Ok(())
    }

    pub(crate) fn start_ztunnel(&mut self) -> anyhow::Result<()> {
        self.ztunnels_started += 1;
        let started = Ztunnel::start(&self.cluster.node, self.ztunnels_started)?;
        self.note(format!("{}: started", started.name));
        self.ztunnels.push(started);
        Ok(())
    }

    /// Takes over answered ADDs and what went on beside the run.
    fn reap(&mut self) -> anyhow::Result<()> {
        let done = |it: &mut JoinHandle<_>| it.is_finished();
        for ended in self.threads.extract_if(.., done) {
            join(ended)?;
        }
        let names: Vec<_> = self.subjects.keys().cloned().collect();
        for name in names {
            let Some(subject) = self.subjects.get_mut(&name) else {
                continue;
            };
            if let Some(adding) = subject.adding.take_if(|adding| adding.is_finished()) {
                let answered = join(adding)?;
                self.answered(&name, answered);
            }
        }
        Ok(())
    }

    pub(crate) fn answered(&mut self, name: &str, answered: Answered) {
        let Answered {
            outcome,
            asked,
            at,
            alive,
        } = answered;
        let Some(subject) = self.subjects.get_mut(name) else {
            return;
        };
        let code = outcome.error().ok().and_then(|it| it.get("code").cloned());
        let event = format!(
            "{name} ({}): ADD answered {} {code:?} after {:?}",
            subject.number,
            outcome.code,
            at - asked
        );
        self.figures.event(at, event);
        if outcome.code != 0 {
            return;
        }
        let (way, _) = wanted(subject.mode, self.is_namespace_in);
        // A label that changed meanwhile may have come too late.
        let promise = if subject.changed.is_some() {
            Promise::CHANGES
        } else {
            Promise::of(way)
        };
        subject.alive = alive;
        self.oracle.promise(subject.number, at, promise);
        if let (Way::Captured, None, [only]) = (way, subject.changed, &self.ztunnels[..])
            && only.since < asked
        {
            self.oracle.served(subject.number, &only.name, at);
        }
    }

    /// Notes which pods each ztunnel serves, and goes on with takeovers.
    fn tend_ztunnels(&mut self) -> anyhow::Result<()> {
        let node = &self.cluster.node;
        let mut served = Vec::new();
        for ztunnel in &self.ztunnels {
            // None is written yet.
            let Ok((is_ready, pods)) = ztunnel.state(node) else {
                continue;
            };
            let now = Instant::now();
            for subject in self.subjects.values() {
                let pod = (subject.uid.clone(), subject.pod.netns.id().inode);
                if pods.contains(&pod) {
                    self.oracle.served(subject.number, &ztunnel.name, now);
                }
            }
            served.push((is_ready, pods));
        }
        if let ([old, _], [(_, olds), (true, news)]) = (&mut self.ztunnels[..], &served[..])
            && old.leaves.is_none()
            && self.hung_ztunnel.is_none()
            && olds.is_subset(news)
        {
            // Before it leaves: what it accepts from now on may be cut.
            self.oracle.leaves(&old.name, Instant::now());
            old.leave(node)?;
            let event = format!("{}: SIGTERM", old.name);
            self.figures.event(Instant::now(), event);
        }
        let ended = |it: &Ztunnel| it.leaves.is_some() && it.has_ended(node).unwrap_or(true);
        let Some(index) = self.ztunnels.iter().position(ended) else {
            return Ok(());
        };
        let ended = self.ztunnels.remove(index);
        node.until_ended(&ended.name)?;
        if let Some(leaves) = ended.leaves {
            let now = Instant::now();
            self.oracle.cuts(Span::new(leaves + DRAINED, now));
            self.figures.fault("takeover", leaves, Some(now));
        }
        self.note(format!("{}: ended", ended.name));
        Ok(())
    }

    /// Takes over what pod-events reported.
    fn hear(&mut self) -> anyhow::Result<()> {
        let all: Vec<_> = self.seen.try_iter().collect();
        for seen in all {
            let is = |state| {
                seen.pods
                    .iter()
                    .filter(move |it| it.state() == state)
                    .count()
            };
            let (enrolled, outside) = (is(PodState::Enrolled), is(PodState::Out));
            let changing = seen.pods.len() - enrolled - outside;
            for (column, value) in [
                ("enrolled", enrolled),
                ("outside", outside),
                ("changing", changing),
            ] {
                self.figures.set(column, seen.at, u32::try_from(value)?);
            }
            for (name, subject) in &mut self.subjects {
                let wanted = wanted(subject.mode, self.is_namespace_in);
                let is_awaited = subject.alive.is_some()
                    && subject.adding.is_none()
                    && subject.changed.is_some_and(|changed| changed < seen.asked);
                let is_there = || {
                    let mut pods = seen.pods.iter();
                    pods.any(|it| subject.is_reported_as(wanted, it))
                };
                if is_awaited && is_there() {
                    subject.changed = None;
                    let promise = Promise::of(wanted.0);
                    self.oracle.promise(subject.number, seen.at, promise);
                    self.figures.event(
                        seen.at,
                        format!("{name} ({}): {:?}", subject.number, wanted.0),
                    );
                    if let Some(alive) = &subject.alive {
                        alive.traffic.allow_long(true);
                    }
                }
            }
        }
        Ok(())
    }

    pub(crate) fn judge(&mut self) {
        let now = Instant::now();
        let records = self.records.try_iter();
        self.judged_late.extend(records.map(|it| (now, it)));
        while let Some((_, record)) = self
            .judged_late
            .pop_front_if(|(at, _)| now.duration_since(*at) >= JUDGED_AFTER)
        {
            let violation = self.oracle.judge(&record);
            self.count(&record, violation.is_some());
            if let Some((sandbox, at, what)) = violation {
                self.violate(sandbox, at, &what);
            }
        }
    }

    fn count(&mut self, record: &Record, is_violation: bool) {
        match record {
            Record::Attempt(attempt) => {
                let column = match attempt.outcome {
                    Ok(Way::Captured) => "captured",
                    Ok(Way::Direct) => "direct",
                    Err(_) => "failed",
                };
                self.figures.count(column, attempt.span.from);
                let is_direct = matches!(attempt.outcome, Ok(Way::Direct));
                if is_direct && !is_violation && self.oracle.is_promised_capture(attempt) {
                    self.escaped.0 += 1;
                    let late = self.oracle.lateness(attempt).unwrap_or_default();
                    self.escaped.1 = self.escaped.1.max(late);
                }
            }
            Record::Lost(lost) => self.figures.count("lost", lost.broke.from),
            Record::Packet { .. } => {}
        }
    }

    fn violate(&mut self, sandbox: u32, at: Instant, what: &str) {
        self.figures.count("violations", at);
        let (name, since) = (
            self.oracle.name(sandbox),
            self.figures.since(at).as_secs_f64(),
        );
        let before = self.figures.before(at, 20);
        self.violations.push(format!(
            "{since:.3} s: {name} ({sandbox}): {what}; before:{before}"
        ));
    }

    pub(crate) fn label_namespace(&mut self, is_in: bool) {
        let mode = if is_in { "ambient" } else { "" };
        let labels = json!({"istio.io/dataplane-mode": mode});
        self.note(format!("namespace: {labels}"));
        self.cluster.label_namespace(mode);
        self.is_namespace_in = is_in;
    }
}

fn lane(what: &str) -> &str {
    if what.starts_with("ztunnel-") && what != "ztunnel-broker" {
        "ztunnel"
    } else {
        what
    }
}

pub(crate) fn join<T>(thread: JoinHandle<anyhow::Result<T>>) -> anyhow::Result<T> {
    let joined = thread.join();
    joined.unwrap_or_else(|_| Err(anyhow::anyhow!("a thread has panicked")))
}
