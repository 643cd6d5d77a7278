//! Random interleavings of calls, sessions, answers and time, against ztunnels that behave as stock does.

use std::collections::{BTreeMap, BTreeSet};

use inpod_proto::zds::{WorkloadRequest, workload_request::Payload};
use proptest::prelude::*;
use prost::Message as _;
use workload::NetnsId;

use super::*;
use crate::{fixture, session::Stage, step::Target};

const TIMEOUT: Duration = Duration::from_secs(10);

/// Sandboxes, pods, netns and ztunnels are few, so that they meet often.
#[derive(Clone, Debug)]
enum Op {
    Set { named: Vec<Given>, behind: u64 },
    Add { it: Given, behind: u64 },
    Remove { container: u8, behind: u64 },
    Conclude(usize),
    Abandon(usize),
    Fetch(u8),
    Connect(usize),
    Hello(usize),
    Disconnect(usize),
    Next(usize),
    Ack(usize),
    Nack(usize),
    Wait(u64),
}

#[derive(Clone, Debug)]
struct Given {
    container: u8,
    pod: u8,
    netns: bool,
    name: u8,
}

fn given() -> impl Strategy<Value = Given> {
    (0..4_u8, 0..3_u8, any::<bool>(), 0..2_u8).prop_map(|(container, pod, netns, name)| Given {
        container,
        pod,
        netns,
        name,
    })
}

fn op() -> impl Strategy<Value = Op> {
    let behind = || prop_oneof![4 => Just(0), 1 => 1..4_u64];
    prop_oneof![
        1 => (prop::collection::vec(given(), 0..4), behind()).prop_map(|(named, behind)| Op::Set { named, behind }),
        3 => (given(), behind()).prop_map(|(it, behind)| Op::Add { it, behind }),
        2 => (0..4_u8, behind()).prop_map(|(container, behind)| Op::Remove { container, behind }),
        1 => (0..4_usize).prop_map(Op::Conclude),
        1 => (0..4_usize).prop_map(Op::Abandon),
        1 => (0..4_u8).prop_map(Op::Fetch),
        1 => (0..2_usize).prop_map(Op::Connect),
        1 => (0..2_usize).prop_map(Op::Hello),
        1 => (0..2_usize).prop_map(Op::Disconnect),
        8 => (0..2_usize).prop_map(Op::Next),
        6 => (0..2_usize).prop_map(Op::Ack),
        2 => (0..2_usize).prop_map(Op::Nack),
        1 => (1..8_u64).prop_map(Op::Wait),
    ]
}

/// What stock ztunnel does with what it is told (shared/reference/ztunnel-zds.md, 3.5 to 3.9).
#[derive(Debug, Default)]
struct Ztunnel {
    session: Option<SessionId>,
    greeted: bool,
    in_flight: Option<(Payload, Option<NetnsId>)>,
    running: BTreeMap<String, (NetnsId, String)>,
    pending: BTreeSet<String>,
    named: BTreeSet<String>,
    complete: bool,
}

impl Ztunnel {
    fn reconnect(&mut self, session: SessionId) {
        *self = Self {
            session: Some(session),
            running: std::mem::take(&mut self.running),
            ..Self::default()
        };
    }

    fn receive(&mut self, message: &Message) {
        let request = WorkloadRequest::decode(&*message.encode()).unwrap();
        let payload = request.payload.unwrap();
        assert!(self.greeted, "nothing before the hello");
        assert!(self.in_flight.is_none(), "one message in flight");
        let only_before = matches!(payload, Payload::Keep(_) | Payload::SnapshotSent(_));
        assert!(
            !(self.complete && only_before),
            "stock ztunnel exits: {payload:?}"
        );
        let netns = message.descriptor().map(Descriptor::netns);
        assert_eq!(netns.is_some(), matches!(payload, Payload::Add(_)));
        self.in_flight = Some((payload, netns));
    }

    fn carry_out(&mut self) {
        match self.in_flight.take().unwrap() {
            (Payload::Add(add), Some(netns)) => {
                self.pending.remove(&add.uid);
                self.named.insert(add.uid.clone());
                let same = self
                    .running
                    .get(&add.uid)
                    .is_some_and(|(had, _)| *had == netns);
                if !same {
                    let name = add.workload_info.unwrap().name;
                    self.running.insert(add.uid, (netns, name));
                }
            }
            (Payload::Keep(keep), _) => drop(self.named.insert(keep.uid)),
            (Payload::Del(del), _) => {
                self.pending.remove(&del.uid);
                self.named.remove(&del.uid);
                if self.complete {
                    self.running.remove(&del.uid);
                }
            }
            (Payload::SnapshotSent(_), _) => {
                self.running.retain(|uid, _| self.named.contains(uid));
                self.complete = true;
            }
            (Payload::Add(_), None) => panic!("an add without a descriptor"),
        }
    }

    /// Whether there was an Add to refuse: its proxy cannot start, and the old one is gone already.
    fn refuse(&mut self) -> bool {
        let Some((Payload::Add(add), Some(netns))) = &self.in_flight else {
            return false;
        };
        let serves = self
            .running
            .get(&add.uid)
            .is_some_and(|(had, _)| had == netns);
        if serves {
            return false;
        }
        self.running.remove(&add.uid);
        self.named.insert(add.uid.clone());
        self.pending.insert(add.uid.clone());
        self.in_flight = None;
        true
    }
}

struct Waiting {
    ticket: Ticket,
    before: Option<Workload>,
    words: u64,
}

struct World {
    ledger: Ledger,
    now: Instant,
    revision: u64,
    ztunnels: [Ztunnel; 2],
    waiting: Vec<Waiting>,
    /// How many words on each sandbox were taken, to know when an undo has nothing to restore.
    words: BTreeMap<SandboxRef, u64>,
    /// A ztunnel that reconnects goes on with what it had, or is a new process.
    fresh: bool,
}

impl World {
    fn new(fresh: bool) -> Self {
        Self {
            ledger: Ledger::new(TIMEOUT),
            now: Instant::now(),
            revision: 10,
            ztunnels: Default::default(),
            waiting: Vec::new(),
            words: BTreeMap::new(),
            fresh,
        }
    }

    fn workload(&mut self, it: &Given, behind: u64) -> Workload {
        self.revision += 1;
        let (container, pod) = (format!("c{}", it.container), format!("p{}", it.pod));
        // A sandbox has one netns, and outside of a fresh process's life a pod has one name.
        let inode = if it.netns {
            u64::from(it.container) + 1
        } else {
            0
        };
        let name = if self.fresh { it.name } else { 0 };
        let mut workload = fixture::workload(&container, &pod, inode, self.revision - behind);
        workload.info = fixture::info(&format!("{pod}-{name}"));
        workload
    }

    fn word(&mut self, sandbox: &SandboxRef) {
        *self.words.entry(sandbox.clone()).or_default() += 1;
    }

    fn run(&mut self, op: Op) {
        match op {
            Op::Set { named, behind } => self.set(&named, behind),
            Op::Add { it, behind } => self.add(&it, behind),
            Op::Remove { container, behind } => {
                self.revision += 1;
                let sandbox = fixture::sandbox(&format!("c{container}"));
                let revision = Revision(self.revision - behind);
                if self.ledger.remove(&sandbox, revision, self.now).is_ok() {
                    self.word(&sandbox);
                }
            }
            Op::Conclude(n) if n < self.waiting.len() => self.conclude(n),
            Op::Abandon(n) if n < self.waiting.len() => {
                let waiting = self.waiting.remove(n);
                self.ledger.abandon(&waiting.ticket, self.now);
                self.check_undone(&waiting);
            }
            Op::Conclude(_) | Op::Abandon(_) => {}
            Op::Fetch(n) => self.fetch(Some(n)),
            Op::Connect(n) => self.connect(n),
            Op::Hello(n) => self.hello(n),
            Op::Disconnect(n) => self.disconnect(n),
            Op::Next(n) => drop(self.next(n)),
            Op::Ack(n) => self.ack(n),
            Op::Nack(n) => self.nack(n),
            Op::Wait(seconds) => self.wait(seconds),
        }
        self.ledger.take_events();
    }

    fn set(&mut self, named: &[Given], behind: u64) {
        let all: Vec<_> = named.iter().map(|it| self.workload(it, behind)).collect();
        let known: Vec<_> = self.words.keys().cloned().collect();
        known.iter().for_each(|sandbox| self.word(sandbox));
        all.iter().for_each(|it| self.word(&it.sandbox));
        let revision = Revision(self.revision - behind);
        self.ledger.set(revision, all, self.now);
    }

    fn add(&mut self, it: &Given, behind: u64) {
        let netns = Given {
            netns: true,
            ..it.clone()
        };
        let workload = self.workload(&netns, behind);
        let sandbox = workload.sandbox.clone();
        let before = self
            .ledger
            .desired()
            .get(&sandbox)
            .map(|entry| entry.workload().clone());
        let busy = self
            .waiting
            .iter()
            .any(|it| it.ticket.awaited.sandbox == sandbox);
        let descriptor = fixture::descriptor(workload.netns.unwrap().inode);
        if let Ok(ticket) = self.ledger.add(workload, descriptor, self.now) {
            self.word(&sandbox);
            // What a second add in a row restores is what was there before the first: not followed here.
            let words = if busy { u64::MAX } else { self.words[&sandbox] };
            self.waiting.push(Waiting {
                ticket,
                before,
                words,
            });
        }
    }

    fn conclude(&mut self, n: usize) {
        let waiting = self.waiting.remove(n);
        if self.ledger.conclude(&waiting.ticket, self.now).is_err() {
            self.check_undone(&waiting);
        }
    }

    /// Without another word on its sandbox, an add that failed leaves the set as it was.
    fn check_undone(&self, waiting: &Waiting) {
        let sandbox = &waiting.ticket.awaited.sandbox;
        if self.words[sandbox] == waiting.words {
            let after = self.ledger.desired().get(sandbox).map(Entry::workload);
            assert_eq!(after, waiting.before.as_ref());
        }
    }

    fn fetch(&mut self, one: Option<u8>) {
        let missing: Vec<_> = self
            .ledger
            .desired()
            .missing()
            .map(|(it, id)| (it.clone(), id))
            .collect();
        for (sandbox, id) in missing {
            if one.is_none_or(|n| sandbox == fixture::sandbox(&format!("c{n}"))) {
                self.ledger
                    .store(&sandbox, fixture::descriptor(id.inode), self.now);
            }
        }
    }

    fn connect(&mut self, n: usize) {
        self.disconnect(n);
        let id = self.ledger.connect(Peer::of_pid(1), self.now);
        self.ztunnels[n].reconnect(id);
        if self.fresh {
            self.ztunnels[n].running.clear();
        }
    }

    fn hello(&mut self, n: usize) {
        if let Some(id) = self.ztunnels[n]
            .session
            .filter(|_| !self.ztunnels[n].greeted)
        {
            self.ledger.hello(id, self.now);
            self.ztunnels[n].greeted = true;
        }
    }

    fn disconnect(&mut self, n: usize) {
        if let Some(id) = self.ztunnels[n].session.take() {
            self.ledger.disconnect(id, "it hung up", self.now);
        }
    }

    fn next(&mut self, n: usize) -> bool {
        let Some(id) = self.ztunnels[n].session else {
            return false;
        };
        let message = self.ledger.next(id, self.now);
        assert!(message.is_none() || self.ledger.desired().is_seeded());
        message
            .iter()
            .for_each(|message| self.ztunnels[n].receive(message));
        message.is_some()
    }

    fn ack(&mut self, n: usize) {
        let ztunnel = &mut self.ztunnels[n];
        if let (Some(id), Some(_)) = (ztunnel.session, &ztunnel.in_flight) {
            ztunnel.carry_out();
            self.ledger.ack(id, Ok(()), self.now).unwrap();
        }
    }

    fn nack(&mut self, n: usize) {
        let Some(id) = self.ztunnels[n].session else {
            return;
        };
        if self.ztunnels[n].refuse() {
            let nack = Nack::parse("failure to start proxy : in use");
            self.ledger.ack(id, nack, self.now).unwrap();
        }
    }

    fn wait(&mut self, seconds: u64) {
        self.now += Duration::from_secs(seconds);
        for n in 0..self.ztunnels.len() {
            if let Some(id) = self.ztunnels[n].session
                && self.ledger.on_time(id, self.now).is_err()
            {
                self.disconnect(n);
            }
        }
    }

    /// Everybody answers, everything is fetched, and nothing happens any more.
    fn settle(&mut self) {
        while !self.waiting.is_empty() {
            self.conclude(0);
        }
        self.fetch(None);
        for n in 0..self.ztunnels.len() {
            self.hello(n);
        }
        // The ack timeout may be near, but is never passed by those who answer.
        for _ in 0..30 {
            for n in 0..self.ztunnels.len() {
                self.ack(n);
                while self.next(n) {
                    self.ack(n);
                }
            }
            self.now += Duration::from_secs(8);
        }
    }

    fn check(&self) {
        for ztunnel in &self.ztunnels {
            if let Some(id) = ztunnel
                .session
                .filter(|_| self.ledger.desired().is_seeded())
            {
                let stage = self.ledger.sessions().get(id).unwrap().session.stage();
                assert_eq!(stage, Stage::Live);
                self.check_ztunnel(ztunnel);
            }
        }
    }

    fn check_ztunnel(&self, ztunnel: &Ztunnel) {
        assert!(
            ztunnel.pending.is_empty(),
            "it would not be ready: {ztunnel:?}"
        );
        let desired = self.ledger.desired();
        for uid in desired.uids() {
            let serves = ztunnel.running.get(uid.as_str());
            let Some(Target { netns, info }) = desired.current(uid).and_then(Target::of) else {
                continue;
            };
            assert_eq!(serves, Some(&(netns, info.name.to_string())), "{uid}");
        }
        for uid in ztunnel.running.keys() {
            assert!(
                desired.current(&fixture::uid(uid)).is_some(),
                "{uid} is served and not desired"
            );
        }
    }
}

fn play(fresh: bool, ops: Vec<Op>) {
    let mut world = World::new(fresh);
    ops.into_iter().for_each(|op| world.run(op));
    world.settle();
    world.check();
}

/// PROPTEST_CASES asks for more.
fn config() -> ProptestConfig {
    ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn at_rest_ztunnels_that_reconnect_serve_exactly_what_is_desired(ops in prop::collection::vec(op(), 0..120)) {
        play(false, ops);
    }

    #[test]
    fn at_rest_ztunnels_that_restart_serve_exactly_what_is_desired(ops in prop::collection::vec(op(), 0..120)) {
        play(true, ops);
    }
}
