//! Pods come, go and change while everything they depend on dies and restarts, and while rules are deleted. In the
//! end each is in the desired state and nothing of ended ones is left.
//!
//! Runs for a minute, with `./integration/test --all` for ten; `CHAOS_SECONDS` changes that, `CHAOS_SEED` repeats
//! an earlier run's choices.
#![cfg(feature = "apiserver")]
#![expect(clippy::unwrap_used, reason = "a test that fails panics")]

#[path = "../cluster/mod.rs"]
mod cluster;
mod rest;

use std::{
    collections::BTreeMap,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use cluster::Cluster;
use fastrand::Rng;
use integration::{Call, Outcome, Pod, SERVICES, eventually};
use nix::sys::signal::Signal;
use serde_json::json;

/// The maximum number of pods at once.
const MAX_PODS: usize = 16;

/// The longest wait between two attempts is 30 s and a half.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(120);

struct Subject {
    pod: Pod,
    mode: Option<&'static str>,
    added: bool,
    adding: Option<JoinHandle<Outcome>>,
}

struct Chaos {
    cluster: Cluster,
    rng: Rng,
    subjects: BTreeMap<String, Subject>,
    is_namespace_in: bool,
    made: u32,
    /// Processes that are down, until when.
    down: BTreeMap<&'static str, Instant>,
    done: BTreeMap<&'static str, u32>,
}

impl Chaos {
    fn new(seed: u64) -> Self {
        let cluster = Cluster::own();
        cluster.label_namespace("ambient");
        Self {
            cluster,
            rng: Rng::with_seed(seed),
            subjects: BTreeMap::new(),
            is_namespace_in: true,
            made: 0,
            down: BTreeMap::new(),
            done: BTreeMap::new(),
        }
    }

    fn is_api_there(&self) -> bool {
        !self.down.contains_key("api-server")
    }

    fn step(&mut self) {
        self.reap();
        self.restart_due(Instant::now());
        let what = match self.rng.u32(0..100) {
            0..25 => self.come(),
            25..40 => self.go(),
            40..60 => self.flip(),
            60..64 => self.flip_namespace(),
            64..74 => self.delete_rules(),
            74..92 => self.kill(),
            92..97 => self.stall_api_server(),
            _ => self.repeat_add(),
        };
        *self.done.entry(what.unwrap_or("nothing")).or_default() += 1;
    }

    fn any(&mut self) -> Option<String> {
        let names: Vec<_> = self.subjects.keys().cloned().collect();
        self.rng.choice(names)
    }

    fn come(&mut self) -> Option<&'static str> {
        if self.subjects.len() >= MAX_PODS || !self.is_api_there() {
            return None;
        }
        self.made += 1;
        let name = format!("p{}", self.made);
        let mode = self
            .rng
            .choice([None, None, Some("ambient"), Some("none")])?;
        let uid = self.cluster.create(&self.cluster.object(&name, mode));
        let pod = self.cluster.sandbox(&name, &uid);
        let subject = Subject {
            adding: Some(self.add(&pod)),
            pod,
            mode,
            added: false,
        };
        self.subjects.insert(name, subject);
        Some("pod created")
    }

    fn add(&self, pod: &Pod) -> JoinHandle<Outcome> {
        let call = self.cluster.node.call(Call::add, pod).timeout_seconds(10);
        thread::spawn(move || call.run().unwrap())
    }

    fn reap(&mut self) {
        for subject in self.subjects.values_mut() {
            if let Some(answered) = subject.adding.take_if(|adding| adding.is_finished()) {
                subject.added |= answered.join().unwrap().code == 0;
            }
        }
    }

    fn repeat_add(&mut self) -> Option<&'static str> {
        let name = self.any()?;
        let subject = self.subjects.get(&name)?;
        if subject.added || subject.adding.is_some() {
            return None;
        }
        let adding = self.add(&subject.pod);
        self.subjects.get_mut(&name)?.adding = Some(adding);
        Some("ADD repeated")
    }

    /// The DEL comes before or after the object's deletion.
    fn go(&mut self) -> Option<&'static str> {
        let name = self.any().filter(|_| self.is_api_there())?;
        let is_first = self.rng.bool();
        let mut subject = self.subjects.remove(&name)?;
        if let Some(adding) = subject.adding.take() {
            // A runtime finishes before it deletes.
            adding.join().unwrap();
        }
        let path = self.cluster.path(&name);
        if is_first {
            self.cluster.server.delete(&path).unwrap();
        }
        self.cluster.node.del(&subject.pod).unwrap();
        if !is_first {
            self.cluster.server.delete(&path).unwrap();
        }
        Some("pod deleted")
    }

    fn flip(&mut self) -> Option<&'static str> {
        let name = self.any().filter(|_| self.is_api_there())?;
        let mode = self.rng.choice([None, Some("ambient"), Some("none")])?;
        let labels = json!({"istio.io/dataplane-mode": mode});
        let change = json!({"metadata": {"labels": labels}});
        self.cluster
            .server
            .patch(&self.cluster.path(&name), &change)
            .unwrap();
        self.subjects.get_mut(&name)?.mode = mode;
        Some("label changed")
    }

    fn flip_namespace(&mut self) -> Option<&'static str> {
        if !self.is_api_there() {
            return None;
        }
        self.is_namespace_in = !self.is_namespace_in;
        let mode = if self.is_namespace_in { "ambient" } else { "" };
        self.cluster.label_namespace(mode);
        Some("namespace's label changed")
    }

    fn delete_rules(&mut self) -> Option<&'static str> {
        let name = self.any()?;
        let pod = &self.subjects.get(&name)?.pod;
        if self.rng.bool() {
            pod.exec(&["nft", "flush", "ruleset"]).unwrap();
        } else {
            // There may be none.
            pod.exec(&["ip", "rule", "del", "pref", "32764"])
                .unwrap_or_default();
        }
        Some("rules torn out")
    }

    fn kill(&mut self) -> Option<&'static str> {
        let [netconfig, broker, pod_events] = SERVICES;
        let all = [netconfig, broker, pod_events, "ztunnel"];
        let what = self
            .rng
            .choice(all)
            .filter(|it| !self.down.contains_key(it))?;
        self.cluster.node.stop(what, Signal::SIGKILL).unwrap();
        let back = Duration::from_millis(self.rng.u64(0..1500));
        self.down.insert(what, Instant::now() + back);
        Some(what)
    }

    fn stall_api_server(&mut self) -> Option<&'static str> {
        if !self.is_api_there() {
            return None;
        }
        self.cluster.server.signal(Signal::SIGSTOP).unwrap();
        let back = Duration::from_millis(self.rng.u64(500..4000));
        self.down.insert("api-server", Instant::now() + back);
        Some("API server stalled")
    }

    /// Restarts what was down long enough.
    fn restart_due(&mut self, now: Instant) {
        let back: Vec<_> = self.down.extract_if(.., |_, then| *then <= now).collect();
        for (what, _) in back {
            match what {
                "api-server" => self.cluster.server.signal(Signal::SIGCONT).unwrap(),
                "ztunnel" => self.cluster.node.start_ztunnel(&[]).unwrap(),
                service => self.cluster.node.start(service).unwrap(),
            }
        }
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "asks how long and with which seed"
)]
fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn whatever_dies_and_changes_in_the_end_every_pod_is_as_it_is_wanted_and_nothing_is_left() {
    let seed = setting("CHAOS_SEED").unwrap_or_else(|| fastrand::u64(..));
    let usual = if setting("INPOD_TESTS_ALL").is_some() {
        600
    } else {
        60
    };
    let seconds = setting("CHAOS_SECONDS").unwrap_or(usual);
    println!("chaos for {seconds} s with CHAOS_SEED={seed}");
    let mut chaos = Chaos::new(seed);
    let end = Instant::now() + Duration::from_secs(seconds);
    while Instant::now() < end {
        chaos.step();
        thread::sleep(Duration::from_millis(chaos.rng.u64(10..250)));
    }
    println!("{:?}", chaos.done);
    for what in [
        "pod created",
        "pod deleted",
        "label changed",
        "rules torn out",
    ] {
        assert!(chaos.done.contains_key(what), "{what} never happened");
    }
    chaos.settle();
    eventually("every pod is as it is wanted", SETTLE_TIMEOUT, || {
        let mut subjects = chaos.subjects.iter();
        subjects.try_for_each(|(name, subject)| chaos.is_as_wanted(name, subject))
    })
    .unwrap();
    eventually("nothing is left of those that went", SETTLE_TIMEOUT, || {
        chaos.is_nothing_leaked()
    })
    .unwrap();
}
