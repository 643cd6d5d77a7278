//! Serves the connection of a ztunnel.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fs::File,
    os::{
        fd::{AsFd as _, BorrowedFd},
        unix::fs::OpenOptionsExt as _,
    },
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use prost::Message as _;
use zds_client::proto::{Version, ZdsHello, workload_request::Payload};
use zds_conformance::wire::{self, Connection, HELLO, Incoming};

use crate::state::{Agent, PodState, State, Wanted};

const TICK: Duration = Duration::from_millis(3);

const RETRY: Duration = Duration::from_secs(1);

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

struct Asked {
    about: About,
    since: Instant,
}

#[derive(Clone)]
enum About {
    Add(String, Wanted),
    Keep(String),
    Del(String),
    SnapshotSent,
    Extra,
}

struct Session<'a> {
    agent: &'a Agent,
    connection: &'a Connection,
    id: u64,
    greeted: bool,
    since: Instant,
    snapshot_sent: bool,
    /// The pods of the set at the beginning of the snapshot.
    to_name: Option<BTreeSet<String>>,
    asked: VecDeque<Asked>,
    /// The faults that have happened already and happen only once.
    done: BTreeSet<&'static str>,
}

pub(crate) fn attend(agent: &Arc<Agent>, connection: &Connection) {
    let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
    let mut session = Session {
        agent,
        connection,
        id,
        greeted: false,
        since: Instant::now(),
        snapshot_sent: false,
        to_name: None,
        asked: VecDeque::new(),
        done: BTreeSet::new(),
    };
    if agent.is("before-hello") {
        session.greet();
    }
    while session.step().is_some() {}
    let mut state = agent.state();
    state.sessions.remove(&id);
    if state.busy == Some(id) {
        state.busy = None;
    }
    if agent.is("credits-close") {
        let added = session.asked.iter().filter_map(|asked| match &asked.about {
            About::Add(_, wanted) => Some(wanted.version),
            About::Keep(_) | About::Del(_) | About::SnapshotSent | About::Extra => None,
        });
        state.credited_by_close.extend(added);
    }
}

impl Session<'_> {
    fn is(&self, fault: &str) -> bool {
        self.agent.is(fault)
    }

    fn once(&mut self, fault: &'static str) -> bool {
        self.agent.is(fault) && self.done.insert(fault)
    }

    fn greet(&mut self) {
        self.greeted = true;
        let mut state = self.agent.state();
        if self.is("resurrects") {
            let removed = std::mem::take(&mut state.removed);
            state.wanted.extend(removed);
        }
        state.sessions.insert(self.id, BTreeMap::new());
    }

    /// Handles the next event; returns `None` at the end of the connection.
    fn step(&mut self) -> Option<()> {
        match self.connection.receive(TICK) {
            Ok(Incoming::Packet(packet)) => self.take(&packet.bytes)?,
            Ok(Incoming::End) if self.is("half-close-ignored") => std::thread::sleep(TICK),
            Ok(Incoming::End) | Err(_) => return None,
            Ok(Incoming::Silence) => {}
        }
        self.check_timeouts()?;
        if self.agent.state().ended.contains(&self.id) {
            return None;
        }
        let busy = !self.asked.is_empty() && !self.is("pipelined");
        if self.greeted && !busy {
            self.send_next()
        } else {
            Some(())
        }
    }

    fn check_timeouts(&self) -> Option<()> {
        let late = |since: Instant| since.elapsed() > self.agent.timeout;
        let no_hello = !self.greeted && late(self.since) && !self.is("no-hello-timeout");
        let no_answer = self.asked.front().is_some_and(|asked| late(asked.since))
            && !self.is("credits-late-ack");
        (!no_hello && !no_answer).then_some(())
    }

    fn take(&mut self, bytes: &[u8]) -> Option<()> {
        if !self.greeted {
            let hello = ZdsHello::decode(bytes).is_ok_and(|hello| hello.version() == Version::V1);
            let accepted = hello && (bytes == HELLO || !self.is("hello-strict"));
            if !accepted && !self.is("hello-unchecked") {
                return None;
            }
            self.greet();
            return Some(());
        }
        if bytes == HELLO && self.is("second-hello-ignored") {
            return Some(());
        }
        if bytes.len() > 1024 && self.is("small-buffer") {
            return None;
        }
        let answer = match wire::answer(bytes) {
            Some(answer) => answer,
            None if self.is("garbage-credited") => String::new(),
            None => return None,
        };
        let Some(asked) = self.asked.pop_front() else {
            return self.is("unasked-ignored").then_some(());
        };
        let answer = if self.is("nack-credited") {
            String::new()
        } else {
            answer
        };
        self.credit(asked.about, &answer);
        Some(())
    }

    fn credit(&mut self, about: About, error: &str) {
        let mut state = self.agent.state();
        if state.busy == Some(self.id) {
            state.busy = None;
        }
        let pending = !self.agent.is("no-del-after-nack");
        let Some(states) = state.sessions.get_mut(&self.id) else {
            return;
        };
        match about {
            About::Add(uid, wanted) if error.is_empty() => {
                if self.agent.is("names-one-twice") && self.done.insert("names-one-twice") {
                    return;
                }
                let identity = wanted
                    .netns
                    .map(|(_, identity)| identity)
                    .unwrap_or_default();
                states.insert(
                    uid,
                    PodState::Added {
                        version: wanted.version,
                        identity,
                    },
                );
            }
            About::Add(uid, wanted) => {
                let retry_at = Instant::now() + RETRY;
                let refused = PodState::Refused {
                    version: wanted.version,
                    pending,
                    retry_at,
                };
                states.insert(uid, refused);
            }
            About::Keep(uid) => drop(states.insert(uid, PodState::Kept)),
            About::Del(uid) => match states.get_mut(&uid) {
                Some(PodState::Refused { pending, .. }) => *pending = false,
                _ => drop(states.remove(&uid)),
            },
            About::SnapshotSent | About::Extra => {}
        }
    }

    /// Sends the next due request, if there is any.
    fn send_next(&mut self) -> Option<()> {
        let Some((about, payload)) = self.next() else {
            return Some(());
        };
        if self.is("head-of-line") {
            self.agent.state().busy = Some(self.id);
        }
        if self.once("empty-datagram") {
            self.connection.send(b"", &[]).ok()?;
        }
        let bytes = wire::encode(self.spoilt(payload));
        let files = self.beside(&about);
        let files: Vec<BorrowedFd<'_>> = files.iter().map(|file| file.as_fd()).collect();
        self.connection.send(&bytes, &files).ok()?;
        self.asked.push_back(Asked {
            about,
            since: Instant::now(),
        });
        Some(())
    }

    fn spoilt(&self, mut payload: Payload) -> Payload {
        if let (Payload::Add(add), true) = (&mut payload, self.is("no-info")) {
            add.workload_info = None;
        }
        payload
    }

    fn beside(&self, about: &About) -> Vec<File> {
        let own = || File::open("/proc/self/ns/net").ok();
        let netns = match about {
            About::Add(_, wanted) => wanted
                .netns
                .as_ref()
                .and_then(|(file, _)| file.try_clone().ok()),
            About::Del(_) if self.is("fd-on-del") => own(),
            About::SnapshotSent if self.is("fd-on-snapshot") => own(),
            About::Keep(_) | About::Del(_) | About::SnapshotSent | About::Extra => None,
        };
        let add = matches!(about, About::Add(..));
        let files = match (add, self.agent.fault()) {
            (true, "no-fd") => vec![],
            (true, "two-fds") => vec![netns, own()],
            (true, "wrong-netns") => vec![own()],
            (true, "no-netns") => vec![File::open("/dev/null").ok()],
            (true, "o-path") => vec![
                File::options()
                    .read(true)
                    .custom_flags(nix::libc::O_PATH)
                    .open("/proc/self/ns/net")
                    .ok(),
            ],
            _ => vec![netns],
        };
        files.into_iter().flatten().collect()
    }

    fn next(&mut self) -> Option<(About, Payload)> {
        let agent = self.agent;
        let state = agent.state();
        let blocked = agent.is("head-of-line") && state.busy.is_some_and(|id| id != self.id);
        if blocked || !(state.seeded || agent.is("before-set")) {
            return None;
        }
        let pods = || state.wanted.keys().cloned().collect();
        let to_name = self.to_name.get_or_insert_with(pods);
        let states = state.sessions.get(&self.id);
        let is_named = |uid: &String| {
            !state.wanted.contains_key(uid) || states.is_some_and(|it| it.contains_key(uid))
        };
        let ends = !self.snapshot_sent && to_name.iter().all(is_named);
        if ends && !self.is("snapshot-ends-last") {
            drop(state);
            return self.end_of_snapshot();
        }
        if let Some(next) = self.change(&state) {
            return Some(next);
        }
        drop(state);
        self.end_of_snapshot()
    }

    fn end_of_snapshot(&mut self) -> Option<(About, Payload)> {
        if !self.snapshot_sent && !self.is("no-end") && !self.waits_for(&About::SnapshotSent) {
            self.snapshot_sent = true;
            return Some((About::SnapshotSent, wire::snapshot_sent()));
        }
        if self.snapshot_sent && self.once("second-snapshot") {
            return Some((About::Extra, wire::snapshot_sent()));
        }
        if self.snapshot_sent && self.once("keep-after-snapshot") {
            return Some((About::Extra, wire::keep("somebody")));
        }
        None
    }

    fn waits_for(&self, wanted: &About) -> bool {
        let same = |asked: &Asked| match (&asked.about, wanted) {
            (About::SnapshotSent, About::SnapshotSent) => true,
            (
                About::Add(a, _) | About::Keep(a) | About::Del(a),
                About::Add(b, _) | About::Keep(b) | About::Del(b),
            ) => a == b,
            _ => false,
        };
        self.asked.iter().any(same)
    }

    /// Returns the change for a pod whose state in this ztunnel is not the desired state: a Del if any is due.
    fn change(&self, state: &State) -> Option<(About, Payload)> {
        let nothing = BTreeMap::new();
        let states = state.sessions.get(&self.id).unwrap_or(&nothing);
        let uids: BTreeSet<_> = state.wanted.keys().chain(states.keys()).collect();
        // The pods of the snapshot come first, so that the snapshot ends while other pods are added.
        let is_later = |uid: &&String| self.to_name.as_ref().is_some_and(|it| !it.contains(*uid));
        let (later, first): (Vec<_>, Vec<_>) = uids.into_iter().partition(is_later);
        let last = state.wanted.keys().next_back();
        let newest = state.sessions.keys().next_back() == Some(&self.id);
        let mut other = None;
        for uid in first.into_iter().chain(later) {
            let left_out = self.is("leaves-one-out") && Some(uid) == last && state.wanted.len() > 1;
            if left_out || self.waits_for(&About::Del(uid.clone())) {
                continue;
            }
            let next = self.step_for(uid, states.get(uid), state.wanted.get(uid));
            let add = matches!(next, Some((About::Add(..), _)));
            let del = matches!(next, Some((About::Del(..), _)));
            let next = next.filter(|_| !(add && self.is("latest-only") && !newest));
            if next.is_some() && del != self.is("dels-last") {
                return next;
            }
            other = other.or(next);
        }
        other
    }

    fn step_for(
        &self,
        uid: &str,
        states: Option<&PodState>,
        wanted: Option<&Wanted>,
    ) -> Option<(About, Payload)> {
        let add = |wanted: &Wanted| {
            let about = About::Add(uid.to_owned(), wanted.clone());
            wanted
                .netns
                .as_ref()
                .map(|_| (about, Payload::Add(wanted.add.clone())))
        };
        let del =
            || (!self.is("forgets-del")).then(|| (About::Del(uid.to_owned()), wire::del(uid)));
        match (states, wanted) {
            (None, Some(wanted)) if wanted.netns.is_some() => add(wanted),
            (None, Some(_)) if !self.snapshot_sent => {
                Some((About::Keep(uid.to_owned()), wire::keep(uid)))
            }
            (Some(PodState::Kept), Some(wanted)) => add(wanted),
            (Some(PodState::Refused { pending: true, .. }), _) => del(),
            (
                Some(PodState::Refused {
                    retry_at, version, ..
                }),
                Some(wanted),
            ) => {
                let due = *retry_at <= Instant::now() && !self.is("never-retries");
                if due || *version != wanted.version {
                    add(wanted)
                } else {
                    None
                }
            }
            (Some(PodState::Added { .. } | PodState::Kept), None) => del(),
            (Some(PodState::Added { version, identity }), Some(wanted))
                if *version != wanted.version =>
            {
                let same = wanted
                    .netns
                    .as_ref()
                    .is_some_and(|(_, now)| now == identity);
                match (same, self.agent.fault()) {
                    (true, "info-change-ignored") | (false, "netns-change-ignored") => {
                        add(&same_as_before(wanted, self))
                    }
                    (true, "info-in-snapshot-ignored") if !self.snapshot_sent => add(wanted),
                    (true, _) => del(),
                    (false, _) => add(wanted),
                }
            }
            _ => None,
        }
    }
}

/// Implements the fault that loses a change: the ztunnel's Add changes nothing.
fn same_as_before(wanted: &Wanted, session: &Session<'_>) -> Wanted {
    let mut same = wanted.clone();
    if session.is("netns-change-ignored") {
        let own = File::open("/proc/self/ns/net").ok().map(Arc::new);
        same.netns = own.zip(wanted.netns.as_ref().map(|(_, identity)| *identity));
    }
    same
}
