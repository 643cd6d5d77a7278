//! The desired state, and the state of each ztunnel.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    os::unix::fs::MetadataExt as _,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use zds_client::proto::{AddWorkload, WorkloadInfo, workload_request::Payload};
use zds_conformance::wire::{MAX_REQUEST_BYTES, encode};

#[derive(Clone)]
pub(crate) struct Wanted {
    pub(crate) add: AddWorkload,
    /// The descriptor of the netns, with device and inode.
    pub(crate) netns: Option<(Arc<File>, (u64, u64))>,
    /// The version, which changes with every call about the pod.
    pub(crate) version: u64,
}

#[derive(Clone)]
pub(crate) enum PodState {
    Added {
        version: u64,
        identity: (u64, u64),
    },
    Kept,
    Refused {
        version: u64,
        pending: bool,
        retry_at: Instant,
    },
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) seeded: bool,
    pub(crate) wanted: BTreeMap<String, Wanted>,
    pub(crate) sessions: BTreeMap<u64, BTreeMap<String, PodState>>,
    /// The session with a request in flight, used by a fault.
    pub(crate) busy: Option<u64>,
    pub(crate) removed: BTreeMap<String, Wanted>,
    pub(crate) leaked: Vec<File>,
    pub(crate) credited_by_close: Vec<u64>,
    /// The sessions that end at once.
    pub(crate) ended: BTreeSet<u64>,
    counter: u64,
}

pub(crate) struct Agent {
    fault: String,
    pub(crate) timeout: Duration,
    state: Mutex<State>,
}

impl Agent {
    pub(crate) fn new(fault: &str, timeout: Duration) -> Self {
        Self {
            fault: fault.to_owned(),
            timeout,
            state: Mutex::default(),
        }
    }

    pub(crate) fn fault(&self) -> &str {
        &self.fault
    }

    pub(crate) fn is(&self, fault: &str) -> bool {
        self.fault == fault
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn seed(&self, lines: &[&str]) -> Result<(), String> {
        let all: Result<Vec<_>, _> = lines.iter().map(|line| self.parse(line)).collect();
        let all = all?;
        let mut state = self.state();
        state.seeded = true;
        state.wanted = all
            .into_iter()
            .map(|wanted| (wanted.add.uid.clone(), wanted))
            .collect();
        Ok(())
    }

    pub(crate) fn remove(&self, uid: &str) {
        let mut state = self.state();
        if let Some(wanted) = state.wanted.remove(uid)
            && self.is("resurrects")
        {
            state.removed.insert(uid.to_owned(), wanted);
        }
    }

    /// Adds a workload, and returns when a ztunnel serves the workload; otherwise restores the previous set.
    pub(crate) fn add(&self, line: &str, seconds: f64) -> Result<(), String> {
        let wanted = self.parse(line)?;
        let (uid, version) = (wanted.add.uid.clone(), wanted.version);
        if let (true, Some((file, _))) = (self.is("leak-fd-at-move"), &wanted.netns) {
            let mut state = self.state();
            if state.wanted.contains_key(&uid) {
                state.leaked.extend(file.try_clone());
            }
        }
        let is_served = self.state().knows(&uid);
        let before = self.state().wanted.insert(uid.clone(), wanted);
        if self.is("early-success") || (self.is("voided-ack-credited") && is_served) {
            return Ok(());
        }
        let old = before
            .as_ref()
            .filter(|_| self.is("old-netns-credited"))
            .map(|before| before.version);
        let end = Instant::now() + Duration::from_secs_f64(seconds);
        let failure = loop {
            let mut counts = [Some(version), old].into_iter().flatten();
            if counts.any(|version| self.state().serves(&uid, version)) {
                return Ok(());
            }
            if self.state().all_refuse(&uid, version) {
                break "every ztunnel refused";
            }
            if Instant::now() >= end {
                break "no ztunnel answered";
            }
            thread::sleep(Duration::from_millis(3));
        };
        let mut state = self.state();
        if self.is("caller-ends-session") {
            let State {
                sessions, ended, ..
            } = &mut *state;
            ended.extend(sessions.keys());
        }
        match before {
            Some(before) => drop(state.wanted.insert(uid, before)),
            None => drop(state.wanted.remove(&uid)),
        }
        Err(failure.to_owned())
    }

    fn parse(&self, line: &str) -> Result<Wanted, String> {
        let words: Vec<_> = line.split(' ').collect();
        let [uid, namespace, name, account, path] = words.as_slice() else {
            return Err(format!("no workload: {line}"));
        };
        let add = AddWorkload {
            uid: (*uid).to_owned(),
            workload_info: Some(WorkloadInfo {
                name: (*name).to_owned(),
                namespace: (*namespace).to_owned(),
                service_account: (*account).to_owned(),
            }),
        };
        if encode(Payload::Add(add.clone())).len() > MAX_REQUEST_BYTES && !self.is("too-long") {
            return Err("too long for ZDS".to_owned());
        }
        let netns = match *path {
            "-" => None,
            path => {
                let file = File::open(path).map_err(|error| format!("{path}: {error}"))?;
                let stat = file.metadata().map_err(|error| error.to_string())?;
                Some((Arc::new(file), (stat.dev(), stat.ino())))
            }
        };
        let mut state = self.state();
        state.counter += 1;
        let version = state.counter;
        if let (true, Some((file, _))) = (self.is("leak-fd"), &netns) {
            state.leaked.extend(file.try_clone());
        }
        Ok(Wanted {
            add,
            netns,
            version,
        })
    }
}

impl State {
    fn knows(&self, uid: &str) -> bool {
        let states = self.sessions.values().map(|states| states.get(uid));
        states
            .flatten()
            .any(|state| matches!(state, PodState::Added { .. }))
    }

    fn serves(&self, uid: &str, wanted: u64) -> bool {
        let serves = |states: &BTreeMap<String, PodState>| matches!(states.get(uid), Some(PodState::Added { version, .. }) if *version == wanted);
        self.sessions.values().any(serves) || self.credited_by_close.contains(&wanted)
    }

    fn all_refuse(&self, uid: &str, wanted: u64) -> bool {
        let refuses = |states: &BTreeMap<String, PodState>| matches!(states.get(uid), Some(PodState::Refused { version, .. }) if *version == wanted);
        !self.sessions.is_empty() && self.sessions.values().all(refuses)
    }
}
