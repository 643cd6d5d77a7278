//! Adds that wait for an acknowledgement.

use std::time::Instant;

use inpod_types::PodUid;
use tokio::sync::watch;

use crate::outcome::{self, Awaited, Evidence, Outcome, Unserved};

/// A caller's wait for its add.
#[derive(Debug)]
pub struct Ticket {
    pub awaited: Awaited,
    pub outcome: watch::Receiver<Option<Outcome>>,
}

#[derive(Debug)]
struct Pending {
    awaited: Awaited,
    outcome: watch::Sender<Option<Outcome>>,
}

/// The adds whose callers wait. Each caller waits alone, also for the workload of another.
#[derive(Debug, Default)]
pub struct PendingAdds(Vec<Pending>);

impl PendingAdds {
    pub fn wait(&mut self, awaited: Awaited) -> Ticket {
        let (sender, outcome) = watch::channel(None);
        self.0.push(Pending {
            awaited: awaited.clone(),
            outcome: sender,
        });
        Ticket { awaited, outcome }
    }

    /// Decides the adds of the pods concerned by a change, and forgets decided adds and callers that have gone.
    pub fn decide(
        &mut self,
        evidence: &Evidence<'_>,
        is_concerned: impl Fn(&PodUid) -> bool,
        now: Instant,
    ) {
        self.0.retain(|pending| {
            let outcome = is_concerned(&pending.awaited.uid)
                .then(|| outcome::decide(evidence, &pending.awaited, now))
                .flatten();
            let waits = outcome.is_none() && !pending.outcome.is_closed();
            if outcome.is_some() {
                pending.outcome.send_replace(outcome);
            }
            waits
        });
    }

    /// Ends all waits; the desired set stays.
    pub fn stop(&mut self) {
        for pending in self.0.drain(..) {
            pending.outcome.send_replace(Some(Err(Unserved::Stopping)));
        }
    }
}
