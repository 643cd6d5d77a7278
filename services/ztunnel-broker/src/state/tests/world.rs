use std::{
    collections::BTreeSet,
    ops::AddAssign,
    time::{Duration, Instant},
};

use inpod_proto::ztunnelbroker::v1::SessionPhase;
use inpod_service::Readiness;
use inpod_types::{Failure, Reason, Revision, Workload};
use tokio::sync::watch;

use super::{
    expected::Expected,
    schedule::{Given, Nature, Op, PODS, ZTUNNELS},
    ztunnel::Ztunnel,
};
use crate::{
    fixture, nack::Nack, next_message::Target, outcome, peer::Peer, session::SessionId,
    state::State,
};

const TIMEOUT: Duration = Duration::from_secs(10);

/// The contract's limit for messages that overtake a Del (rule A26).
const MAX_BEFORE_DEL: usize = 7;

/// The largest number of messages in a snapshot of the three pods, between which Adds and Dels of other pods take their turns.
const MAX_IN_SNAPSHOT: usize = 16;

/// The number of adds in a load, which exceeds both limits.
const LOAD: usize = MAX_IN_SNAPSHOT + 4;

/// A time longer than any quarantine.
const LONG: Duration = Duration::from_secs(4000);

/// A caller that waits for an add, until it has learnt the outcome.
struct Waiting {
    workload: Workload,
    waits: watch::Receiver<()>,
}

/// Counts of the events for which the model exists.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Reached {
    pub(super) snapshots: u64,
    pub(super) keeps: u64,
    pub(super) refusals: u64,
    pub(super) served: u64,
    pub(super) unserved: u64,
    pub(super) superseded: u64,
    pub(super) restarts: u64,
    pub(super) quarantines: u64,
    pub(super) stopped_by_snapshot: u64,
}

impl AddAssign for Reached {
    fn add_assign(&mut self, other: Self) {
        self.snapshots += other.snapshots;
        self.keeps += other.keeps;
        self.refusals += other.refusals;
        self.served += other.served;
        self.unserved += other.unserved;
        self.superseded += other.superseded;
        self.restarts += other.restarts;
        self.quarantines += other.quarantines;
        self.stopped_by_snapshot += other.stopped_by_snapshot;
    }
}

fn peer(n: usize) -> Peer {
    Peer::from_pid(i32::try_from(n).unwrap() + 1)
}

pub(super) struct World {
    state: State,
    now: Instant,
    revision: u64,
    ztunnels: [Ztunnel; ZTUNNELS],
    waiting: Vec<Waiting>,
    expected: Expected,
    nature: Nature,
    pub(super) reached: Reached,
}

impl World {
    pub(super) fn new(nature: Nature) -> Self {
        Self {
            state: State::new(TIMEOUT, Readiness::default()),
            now: Instant::now(),
            revision: 10,
            ztunnels: Default::default(),
            waiting: Vec::new(),
            expected: Expected::default(),
            nature,
            reached: Reached::default(),
        }
    }

    fn workload(&mut self, it: &Given, behind: u64) -> Workload {
        self.revision += 1;
        let (container, pod) = (format!("c{}", it.container), format!("p{}", it.pod));
        // A sandbox has a single netns, and a pod has a single name unless ztunnels are fresh processes.
        let inode = if it.netns {
            u64::from(it.container) + 1
        } else {
            0
        };
        let name = if self.nature.fresh { it.name } else { 0 };
        let mut workload = fixture::workload(&container, &pod, inode, self.revision - behind);
        workload.info = fixture::info(&format!("{pod}-{name}"));
        workload
    }

    pub(super) fn run(&mut self, op: Op) {
        match op {
            Op::Set { named, behind } => self.set(&named, behind),
            Op::Add { it, behind } => self.add(&it, behind),
            Op::Remove { container, behind } => self.remove(container, behind),
            Op::Conclude(n) if n < self.waiting.len() => self.finish(n),
            Op::Abandon(n) if n < self.waiting.len() => drop(self.waiting.remove(n)),
            Op::Conclude(_) | Op::Abandon(_) => {}
            Op::Fetch(n) => self.fetch(Some(n)),
            Op::Connect(n) => self.connect(n),
            Op::Hello(n) => self.hello(n),
            Op::Disconnect(n) => self.disconnect(n, "it closed the connection"),
            Op::Next(n) => drop(self.next(n)),
            Op::Ack(n) => self.ack(n),
            Op::Load(n) => self.load(n),
            Op::Refuse(n) => self.refuse(n),
            Op::Misread(n) => self.misread(n),
            Op::Restart => self.restart(),
            Op::Wait(seconds) => self.wait(Duration::from_secs(seconds)),
        }
        self.note_released();
        self.check_calls();
        self.state.check_queues(self.now);
    }

    fn note_released(&mut self) {
        let desired = self.state.desired();
        for pod in (0..PODS).map(|pod| format!("p{pod}")) {
            if desired.current(&fixture::uid(&pod)).is_none() {
                for ztunnel in &mut self.ztunnels {
                    ztunnel.released.insert(pod.clone());
                }
            }
        }
    }

    fn set(&mut self, named: &[Given], behind: u64) {
        let all: Vec<_> = named.iter().map(|it| self.workload(it, behind)).collect();
        let known = self.state.desired().entries();
        let mut before: BTreeSet<_> = known.map(|it| it.workload.sandbox.clone()).collect();
        let revision = Revision(self.revision - behind);
        self.state.set(revision, all.clone(), self.now);
        for ztunnel in &mut self.ztunnels {
            ztunnel.in_snapshot = 0;
            ztunnel.released.clear();
        }
        for workload in all {
            let sandbox = workload.sandbox.clone();
            let after = self.state.desired().get(&sandbox);
            let after = after.map(|entry| entry.workload.clone());
            // The set may not know the netns.
            let netns = after.as_ref().and_then(|after| after.netns);
            before.remove(&sandbox);
            if after == Some(Workload { netns, ..workload }) {
                self.expected.change(&sandbox, after);
            }
        }
        for sandbox in before {
            if self.state.desired().get(&sandbox).is_none() {
                self.expected.change(&sandbox, None);
            }
        }
    }

    fn add(&mut self, it: &Given, behind: u64) {
        let given = Given {
            netns: true,
            ..it.clone()
        };
        let workload = self.workload(&given, behind);
        let sandbox = workload.sandbox.clone();
        let descriptor = fixture::descriptor(workload.netns.unwrap().inode);
        if let Ok(mut waits) = self.state.add(workload.clone(), descriptor, self.now) {
            self.expected.change(&sandbox, Some(workload.clone()));
            // The outcome of a new add is decided without a change, too.
            waits.mark_changed();
            self.waiting.push(Waiting { workload, waits });
        }
    }

    fn remove(&mut self, container: u8, behind: u64) {
        self.revision += 1;
        let sandbox = fixture::sandbox(&format!("c{container}"));
        let revision = Revision(self.revision - behind);
        if self.state.remove(&sandbox, revision, self.now).is_ok() {
            self.expected.change(&sandbox, None);
        }
    }

    /// Ends a caller's wait: its time is over.
    fn finish(&mut self, n: usize) {
        let waiting = self.waiting.remove(n);
        let cause = outcome::timeout_cause(&self.state, &waiting.workload, self.now);
        assert_ne!(cause.reason, Reason::RevisionStale);
        self.reached.unserved += 1;
    }

    /// Checks the desired set, and decides the adds of callers that a change has woken, as [`crate::hub::Hub`] does.
    fn check_calls(&mut self) {
        self.expected.check(self.state.desired());
        let waiting = std::mem::take(&mut self.waiting);
        for mut caller in waiting {
            let decided = outcome::decide(&self.state, &caller.workload, self.now);
            let is_woken = caller.waits.has_changed().unwrap();
            caller.waits.mark_unchanged();
            match decided {
                None => self.waiting.push(caller),
                Some(outcome) => {
                    assert!(is_woken, "a caller sleeps: {:?}", caller.workload);
                    self.check_outcome(&caller.workload, outcome);
                }
            }
        }
    }

    fn check_outcome(&mut self, workload: &Workload, outcome: Result<SessionId, Failure>) {
        let current = self.state.desired().current(&workload.uid);
        let stands = current.is_some_and(|entry| entry.workload == *workload);
        match outcome {
            Err(failure) => {
                let is_superseded = failure.reason == Reason::RevisionStale;
                assert_eq!(is_superseded, !stands, "{workload:?}: {failure}");
                self.reached.unserved += 1;
                self.reached.superseded += u64::from(is_superseded);
            }
            Ok(id) => {
                let mut ztunnels = self.ztunnels.iter();
                let ztunnel = ztunnels.find(|it| it.session == Some(id)).unwrap();
                let serves = ztunnel.running.get(workload.uid.as_str());
                let asked = (workload.netns.unwrap(), workload.info.name.to_string());
                assert_eq!(serves, Some(&asked), "{}", workload.uid);
                self.reached.served += 1;
            }
        }
    }

    fn fetch(&mut self, one: Option<u8>) {
        let missing = self.state.desired().missing();
        let missing: Vec<_> = missing.map(|(it, id)| (it.clone(), id)).collect();
        for (sandbox, id) in missing {
            if one.is_none_or(|n| sandbox == fixture::sandbox(&format!("c{n}"))) {
                let descriptor = fixture::descriptor(id.inode);
                self.state.store(&sandbox, descriptor, self.now);
            }
        }
    }

    fn connect(&mut self, n: usize) {
        self.disconnect(n, "it closed the connection");
        let id = self.state.connect(peer(n), self.now);
        self.ztunnels[n].reconnect(id);
        if self.nature.fresh {
            self.ztunnels[n].running.clear();
        }
    }

    fn has_quarantine(&self) -> bool {
        let quarantine = &self.state.inputs().quarantine;
        let uids = (0..PODS).map(|pod| fixture::uid(&format!("p{pod}")));
        let mut suspicions = uids.filter_map(|uid| quarantine.suspicion(&uid).cloned());
        suspicions.any(|suspicion| suspicion.is_in_quarantine())
    }

    fn hello(&mut self, n: usize) {
        let ztunnel = &mut self.ztunnels[n];
        if let Some(id) = ztunnel.session.filter(|_| !ztunnel.greeted) {
            ztunnel.greeted = true;
            ztunnel.released.clear();
            self.state.hello(id, self.now);
            self.note_released();
        }
    }

    fn disconnect(&mut self, n: usize, why: &str) {
        if let Some(id) = self.ztunnels[n].session.take() {
            self.state.disconnect(id, why, self.now);
        }
    }

    fn next(&mut self, n: usize) -> bool {
        let Some(id) = self.ztunnels[n].session else {
            return false;
        };
        let is_del_due = self.is_del_due(n);
        let (Some(message), _) = self.state.next(id, self.now) else {
            return false;
        };
        self.check_turns(n, message.verb(), is_del_due);
        assert!(self.state.desired().is_seeded());
        self.reached.keeps += u64::from(message.verb() == "keep");
        self.ztunnels[n].receive(&message);
        self.check_stopped(n);
        true
    }

    /// Adds a pod again and again, each time in another netns, so that at any time a caller waits and a message is due.
    fn load(&mut self, n: usize) {
        for round in 0..LOAD {
            let it = Given {
                container: u8::try_from(round % 2).unwrap(),
                pod: 0,
                netns: true,
                name: 0,
            };
            self.add(&it, 0);
            self.note_released();
            self.next(n);
            self.ack(n);
            self.check_calls();
        }
    }

    /// Returns whether a ztunnel serves a pod that is not desired.
    fn is_del_due(&self, n: usize) -> bool {
        let ztunnel = &self.ztunnels[n];
        let desired = self.state.desired();
        let mut served = ztunnel.running.keys();
        ztunnel.complete && served.any(|uid| desired.current(&fixture::uid(uid)).is_none())
    }

    /// Checks that adds delay neither a Del nor the end of the snapshot for long.
    fn check_turns(&mut self, n: usize, verb: &str, is_del_due: bool) {
        let may_keep = self.state.desired().may_keep(self.now);
        let ztunnel = &mut self.ztunnels[n];
        let overtakes = is_del_due && verb != "delete";
        ztunnel.before_del = if overtakes { ztunnel.before_del + 1 } else { 0 };
        assert!(ztunnel.before_del <= MAX_BEFORE_DEL, "a Del starves");
        let delays = !ztunnel.complete && may_keep && verb != "snapshot sent";
        ztunnel.in_snapshot += usize::from(delays);
        assert!(
            ztunnel.in_snapshot <= MAX_IN_SNAPSHOT,
            "the snapshot does not end"
        );
    }

    /// Checks that the end of a snapshot stops only pods that were not desired at some time during the snapshot, or must
    /// not be kept because sessions ended over their Keep.
    fn check_stopped(&mut self, n: usize) {
        for uid in self.ztunnels[n].stopping() {
            let uid = fixture::uid(uid);
            let deferral = self
                .state
                .inputs()
                .quarantine
                .deferral(&uid, &peer(n).ztunnel);
            let feared = deferral.is_some_and(|it| !it.may_keep);
            let is_released = self.ztunnels[n].released.contains(uid.as_str());
            assert!(is_released || feared, "{uid} should have been kept");
            self.reached.stopped_by_snapshot += 1;
        }
    }

    fn ack(&mut self, n: usize) {
        let ztunnel = &mut self.ztunnels[n];
        let (Some(id), Some(_)) = (ztunnel.session, &ztunnel.in_flight) else {
            return;
        };
        let poison = self.nature.poison.map(|pod| format!("p{pod}"));
        if poison.is_some() && ztunnel.adding() == poison.as_deref() {
            self.disconnect(n, "it crashed");
            return;
        }
        ztunnel.carry_out();
        let before = self.phase(id);
        self.state.ack(id, Ok(()), self.now).unwrap();
        self.reached.snapshots += u64::from(self.phase(id) != before);
    }

    fn phase(&self, id: SessionId) -> SessionPhase {
        self.state.sessions()[&id].phase()
    }

    fn refuse(&mut self, n: usize) {
        let Some(id) = self.ztunnels[n].session else {
            return;
        };
        if self.ztunnels[n].refuse() {
            let nack = Nack::parse("failure to start proxy : in use");
            self.state.ack(id, nack, self.now).unwrap();
            self.reached.refusals += 1;
        }
    }

    /// Plays a ztunnel that cannot read the message, and disconnects.
    fn misread(&mut self, n: usize) {
        let ztunnel = &self.ztunnels[n];
        if let (Some(id), Some(_)) = (ztunnel.session, &ztunnel.in_flight) {
            let nack = Nack::parse("failure to read message : truncated");
            self.state.ack(id, nack, self.now).unwrap_err();
            self.disconnect(n, "it could not read a message");
        }
    }

    /// Restarts the broker. The new broker has the same desired set; the callers' connections have failed.
    fn restart(&mut self) {
        let desired = self.state.desired();
        let seeded = desired.is_seeded();
        let all: Vec<_> = desired.entries().map(|it| it.workload.clone()).collect();
        self.state = State::new(TIMEOUT, Readiness::default());
        self.waiting.clear();
        for ztunnel in &mut self.ztunnels {
            ztunnel.session = None;
        }
        if seeded {
            self.state.set(Revision(self.revision), all, self.now);
        }
        self.reached.restarts += 1;
    }

    fn wait(&mut self, time: Duration) {
        self.now += time;
        for n in 0..ZTUNNELS {
            if let Some(id) = self.ztunnels[n].session
                && self.state.check_deadline(id, self.now).is_err()
            {
                self.disconnect(n, "it was silent");
            }
        }
    }

    /// Responds, fetches and reconnects until nothing happens any more.
    pub(super) fn settle(&mut self) {
        while !self.waiting.is_empty() {
            self.finish(0);
        }
        self.fetch(None);
        self.answer_all();
        self.reached.quarantines += u64::from(self.has_quarantine());
        // The steps come close to the ack timeout without exceeding the timeout.
        for step in [Duration::from_secs(8); 10].iter().chain(&[LONG; 4]) {
            self.answer_all();
            self.now += *step;
        }
        self.answer_all();
    }

    fn answer_all(&mut self) {
        for n in 0..ZTUNNELS {
            // A poison pod costs several sessions until it is in quarantine.
            for _ in 0..8 {
                if self.ztunnels[n].session.is_none() {
                    self.connect(n);
                }
                self.hello(n);
                self.ack(n);
                while self.next(n) {
                    self.ack(n);
                }
                self.check_calls();
            }
        }
    }

    pub(super) fn check(&self) {
        if !self.state.desired().is_seeded() {
            return;
        }
        for ztunnel in &self.ztunnels {
            let session = &self.state.sessions()[&ztunnel.session.unwrap()];
            assert_eq!(session.phase(), SessionPhase::Live);
            // A kept pod may not have been served before.
            assert!(session.serves() >= ztunnel.running.len());
            self.check_ztunnel(ztunnel);
        }
    }

    fn check_ztunnel(&self, ztunnel: &Ztunnel) {
        let pending = &ztunnel.pending;
        assert!(pending.is_empty(), "it would not be ready: {ztunnel:?}");
        let desired = self.state.desired();
        for (uid, _) in desired
            .pods()
            .filter(|(uid, _)| !self.is_poison(uid.as_str()))
        {
            let serves = ztunnel.running.get(uid.as_str());
            let Some(Target { netns, info }) = desired.current(uid).and_then(Target::of) else {
                continue;
            };
            assert_eq!(serves, Some(&(netns, info.name.to_string())), "{uid}");
        }
        for uid in ztunnel.running.keys() {
            let desired = desired.current(&fixture::uid(uid));
            assert!(desired.is_some(), "{uid} is served and not desired");
        }
    }

    fn is_poison(&self, uid: &str) -> bool {
        self.nature
            .poison
            .is_some_and(|pod| uid == format!("p{pod}"))
    }
}
