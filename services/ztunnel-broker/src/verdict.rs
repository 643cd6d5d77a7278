//! Whether a ztunnel serves a workload, and if none does, why.

use std::time::{Duration, Instant};

use inpod_types::{PodUid, Revision, SandboxRef, Workload};

use crate::{
    desired::Entry,
    session::{Known, Session, Stage, Standing},
    sessions::{SessionId, Sessions},
    step::Target,
};

/// The workload that an add waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Awaited {
    /// Its sandbox.
    pub sandbox: SandboxRef,
    /// Its pod.
    pub uid: PodUid,
    /// Which word on it.
    pub revision: Revision,
    /// What ztunnel is to be told.
    pub target: Target,
}

impl Awaited {
    /// The workload, whose netns's descriptor is there.
    pub fn new(workload: &Workload, netns: inpod_types::NetnsId) -> Self {
        Self {
            sandbox: workload.sandbox.clone(),
            uid: workload.uid.clone(),
            revision: workload.revision,
            target: Target {
                netns,
                info: workload.info.clone(),
            },
        }
    }

    /// Whether this is what is desired.
    pub fn is(&self, entry: &Entry) -> bool {
        let workload = entry.workload();
        workload.sandbox == self.sandbox
            && workload.uid == self.uid
            && workload.revision == self.revision
            && workload.info == self.target.info
            && workload.netns == Some(self.target.netns)
    }
}

/// Why no ztunnel serves a workload.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unserved {
    /// A later word on the sandbox or its pod came meanwhile.
    #[error("a later change of the workload came meanwhile")]
    Superseded,
    /// None has been there in this run of the broker.
    #[error("no ztunnel has connected since the broker started")]
    NeverConnected,
    /// None is there any more.
    #[error("ztunnel was lost {} s ago ({why}) and has not come back", .ago.as_secs())]
    Lost {
        /// Since when.
        ago: Duration,
        /// Why.
        why: String,
    },
    /// One is there and has not been brought up to date.
    #[error("ztunnel is connected, but its snapshot is not finished")]
    SnapshotUnfinished,
    /// One is there and does not answer.
    #[error("ztunnel did not acknowledge the workload in time")]
    Silent,
    /// It is not told for now.
    #[error(
        "ztunnel's connection ended {times} times in a row while it was told of the pod (the last time: {cause}); it is told again in {} s",
        .retry_in.as_secs()
    )]
    Quarantined {
        /// How many sessions ended.
        times: u32,
        /// Why the last did.
        cause: String,
        /// When it is told again.
        retry_in: Duration,
    },
    /// All have refused it.
    #[error("ztunnel refused the workload: {0}")]
    Refused(String),
    /// The broker is being stopped.
    #[error("the broker is being stopped")]
    Stopping,
}

/// What came of an add.
pub type Verdict = Result<SessionId, Unserved>;

/// What verdicts are found on.
#[derive(Clone, Copy, Debug)]
pub struct Ground<'a> {
    /// What is desired, and who is suspected.
    pub known: Known<'a>,
    /// The connected ztunnels.
    pub sessions: &'a Sessions,
}

/// Decides an add as soon as it can be decided: by the first positive acknowledgement, by the last refusal, by a
/// quarantine, or by a later word.
pub fn judge(ground: &Ground<'_>, awaited: &Awaited, now: Instant) -> Option<Verdict> {
    let current = ground.known.desired.current(&awaited.uid);
    if !current.is_some_and(|entry| awaited.is(entry)) {
        return Some(Err(Unserved::Superseded));
    }
    let standings: Vec<_> = standings(ground.sessions, awaited, now).collect();
    let added =
        |(id, standing): &(SessionId, Standing)| matches!(standing, Standing::Added).then_some(*id);
    if let Some(id) = standings.iter().find_map(added) {
        return Some(Ok(id));
    }
    let sent = standings.iter().any(|(_, it)| matches!(it, Standing::Sent));
    if let Some(quarantine) = quarantine(ground, awaited, now).filter(|_| !sent) {
        return Some(Err(quarantine));
    }
    let refusals: Option<Vec<_>> = standings.iter().map(|(_, it)| words(it)).collect();
    let refusals = refusals.filter(|refusals| !refusals.is_empty())?;
    Some(Err(Unserved::Refused(refusals.join("; "))))
}

/// Why the pod is not told, where that is so in every session; the wait is the shortest.
fn quarantine(ground: &Ground<'_>, awaited: &Awaited, now: Instant) -> Option<Unserved> {
    let of = |(_, session): (_, &Session)| {
        let by = session.ztunnel();
        let suspicion = ground.known.suspects.by(&awaited.uid, by)?.clone();
        Some((suspicion.quarantined_until(now)?, suspicion))
    };
    let all: Option<Vec<_>> = ground.sessions.greeted().map(of).collect();
    let (until, suspicion) = all?.into_iter().min_by_key(|(until, _)| *until)?;
    Some(Unserved::Quarantined {
        times: suspicion.times,
        cause: suspicion.cause,
        retry_in: until.saturating_duration_since(now),
    })
}

/// Why an add that nobody has decided ran out of time.
pub fn blame(sessions: &Sessions, awaited: &Awaited, now: Instant) -> Unserved {
    let standings: Vec<_> = standings(sessions, awaited, now).collect();
    if standings.is_empty() {
        return absent(sessions, now);
    }
    if let Some(words) = standings.iter().find_map(|(_, it)| words(it)) {
        return Unserved::Refused(words.to_owned());
    }
    let sent = standings.iter().any(|(_, it)| matches!(it, Standing::Sent));
    let live = sessions.greeted().any(|(_, it)| it.stage() == Stage::Live);
    if sent || live {
        Unserved::Silent
    } else {
        Unserved::SnapshotUnfinished
    }
}

fn absent(sessions: &Sessions, now: Instant) -> Unserved {
    sessions
        .lost()
        .map_or(Unserved::NeverConnected, |lost| Unserved::Lost {
            ago: now.saturating_duration_since(lost.at),
            why: lost.why.clone(),
        })
}

fn standings(
    sessions: &Sessions,
    awaited: &Awaited,
    now: Instant,
) -> impl Iterator<Item = (SessionId, Standing)> {
    sessions.greeted().map(move |(id, session)| {
        let standing = session.standing(&awaited.uid, &awaited.target, now);
        (id, standing)
    })
}

fn words(standing: &Standing) -> Option<&str> {
    match standing {
        Standing::Refused(nack) => Some(&nack.words),
        Standing::Added | Standing::Sent | Standing::Owing => None,
    }
}
