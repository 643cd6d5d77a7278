//! A pod of the run: its labels, its sandbox, and its expected state.

use std::{
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use inpod_proto::{
    podevents::v1::{PodState, PodSummary},
    types::v1::Reason,
};
use integration::{Inhabitant, Outcome, Pod};

use crate::kube::alone::chaos::{oracle::Way, traffic::Traffic};

/// `istio.io/dataplane-mode` of a pod.
pub(crate) type Mode = Option<&'static str>;

pub(crate) const MODES: [Mode; 4] = [None, None, Some("ambient"), Some("none")];

/// The process and traffic of a sandbox whose ADD succeeded.
#[derive(Debug)]
pub(crate) struct Alive {
    pub(crate) traffic: Traffic,
    pub(crate) _inhabitant: Inhabitant,
}

/// The end of an ADD.
#[derive(Debug)]
pub(crate) struct Answered {
    pub(crate) outcome: Outcome,
    pub(crate) asked: Instant,
    pub(crate) at: Instant,
    pub(crate) alive: Option<Alive>,
}

#[derive(Debug)]
pub(crate) struct Subject {
    pub(crate) uid: String,
    pub(crate) mode: Mode,
    pub(crate) number: u32,
    pub(crate) pod: Arc<Pod>,
    pub(crate) alive: Option<Alive>,
    pub(crate) adding: Option<JoinHandle<anyhow::Result<Answered>>>,
    /// Its labels were changed then; `None` once the agent has reported what follows from them.
    pub(crate) changed: Option<Instant>,
    /// It may be labelled, ended or replaced from then on.
    pub(crate) free_from: Instant,
    /// Never labelled, ended or replaced.
    pub(crate) is_fixed: bool,
}

/// Returns the way that labels ask for, and the agent's reason for it.
pub(crate) fn wanted(mode: Mode, is_namespace_in: bool) -> (Way, Reason) {
    match mode {
        Some("ambient") => (Way::Captured, Reason::LabelOnPod),
        Some(_) => (Way::Direct, Reason::OptedOut),
        None if is_namespace_in => (Way::Captured, Reason::LabelOnNamespace),
        None => (Way::Direct, Reason::NotSelected),
    }
}

impl Subject {
    /// Returns whether the agent has reported the state that follows from the newest labels.
    pub(crate) fn is_settled(&self) -> bool {
        self.alive.is_some() && self.adding.is_none() && self.changed.is_none()
    }

    pub(crate) fn is_free(&self) -> bool {
        !self.is_fixed && self.is_settled() && Instant::now() >= self.free_from
    }

    /// Returns whether a report shows the wanted state, for the reason of the newest labels.
    pub(crate) fn is_reported_as(&self, (way, reason): (Way, Reason), seen: &PodSummary) -> bool {
        let state = match way {
            Way::Captured => PodState::Enrolled,
            Way::Direct => PodState::Out,
        };
        let sandbox = seen.sandbox.as_ref();
        let is_current = sandbox.is_some_and(|it| it.container_id == self.pod.container_id);
        is_current && seen.state() == state && seen.reason() == reason
    }
}

/// Fewer than the number of tears in a row that are repaired without a delay (decision 42).
pub(crate) const MAX_TEARS: usize = 4;

/// Tears are in a row if less lies between them.
pub(crate) const TEARS_APART: Duration = Duration::from_secs(75);
