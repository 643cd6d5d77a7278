//! Adds that wait for an acknowledgement, and their undo.

use std::{collections::BTreeMap, time::Instant};

use inpod_types::{PodUid, Revision, SandboxRef};
use tokio::sync::watch;

use crate::{
    desired::Entry,
    outcome::{self, Awaited, Evidence, Outcome, Unserved},
};

#[derive(Debug)]
pub enum Undo {
    /// The workload was desired before, or a caller's add has succeeded.
    Nothing,
    Restore(Option<Box<Entry>>),
}

/// A caller's place among the callers that wait for an add.
#[derive(Clone, Debug)]
pub struct Ticket {
    pub awaited: Awaited,
    pub outcome: watch::Receiver<Option<Outcome>>,
    serial: u64,
}

#[derive(Debug)]
struct Pending {
    awaited: Awaited,
    serial: u64,
    waiters: usize,
    undo: Undo,
    outcome: watch::Sender<Option<Outcome>>,
}

/// The pending adds: at most one per sandbox. Several callers may wait for the same add.
#[derive(Debug, Default)]
pub struct PendingAdds {
    by_sandbox: BTreeMap<SandboxRef, Pending>,
    serials: u64,
}

impl PendingAdds {
    /// Registers a wait for an add. A repeated call joins an undecided add. Another add of the sandbox supersedes the
    /// earlier add and, if nothing else changed in between, takes over the earlier undo, which restores the state
    /// before both.
    pub fn join(&mut self, awaited: Awaited, undo: Undo) -> Ticket {
        let earlier = self.by_sandbox.remove(&awaited.sandbox);
        let pending = match earlier {
            Some(same) if same.awaited == awaited && same.outcome.borrow().is_none() => same,
            Some(older) => {
                older.decide(Err(Unserved::Superseded));
                let undo = older.undo_before(&awaited, undo);
                self.begin(awaited, undo)
            }
            None => self.begin(awaited, undo),
        };
        let ticket = Ticket {
            awaited: pending.awaited.clone(),
            outcome: pending.outcome.subscribe(),
            serial: pending.serial,
        };
        let pending = Pending {
            waiters: pending.waiters + 1,
            ..pending
        };
        let sandbox = ticket.awaited.sandbox.clone();
        self.by_sandbox.insert(sandbox, pending);
        ticket
    }

    fn begin(&mut self, awaited: Awaited, undo: Undo) -> Pending {
        self.serials += 1;
        Pending {
            awaited,
            serial: self.serials,
            waiters: 0,
            undo,
            outcome: watch::Sender::new(None),
        }
    }

    /// Ends a caller's wait. Returns the entry to restore if no caller waits any more and no caller was answered with
    /// success.
    pub fn leave(&mut self, ticket: &Ticket, served: bool) -> Undo {
        let sandbox = &ticket.awaited.sandbox;
        let Some(pending) = self.by_sandbox.get_mut(sandbox) else {
            return Undo::Nothing;
        };
        if pending.serial != ticket.serial {
            return Undo::Nothing;
        }
        pending.waiters = pending.waiters.saturating_sub(1);
        if served {
            pending.undo = Undo::Nothing;
        }
        if pending.waiters > 0 {
            return Undo::Nothing;
        }
        let gone = self.by_sandbox.remove(sandbox);
        gone.map_or(Undo::Nothing, |pending| pending.undo)
    }

    /// Keeps the workload regardless of the outcome of its add, because the whole set contains the workload.
    pub fn confirm(&mut self, sandbox: &SandboxRef, revision: Revision) {
        if let Some(pending) = self.by_sandbox.get_mut(sandbox)
            && pending.awaited.revision <= revision
        {
            pending.undo = Undo::Nothing;
        }
    }

    /// Decides the undecided adds of the pods concerned by a change.
    pub fn decide(
        &self,
        evidence: &Evidence<'_>,
        is_concerned: impl Fn(&PodUid) -> bool,
        now: Instant,
    ) {
        for pending in self.by_sandbox.values() {
            if is_concerned(&pending.awaited.uid)
                && pending.outcome.borrow().is_none()
                && let Some(outcome) = outcome::decide(evidence, &pending.awaited, now)
            {
                pending.decide(outcome);
            }
        }
    }

    /// Ends all waits; the desired set stays.
    pub fn stop(&mut self) {
        for pending in self.by_sandbox.values_mut() {
            pending.undo = Undo::Nothing;
            pending.decide(Err(Unserved::Stopping));
        }
    }
}

impl Pending {
    /// Returns the undo of a later add, whose own undo is `undo`.
    fn undo_before(self, later: &Awaited, undo: Undo) -> Undo {
        let stood = match &undo {
            Undo::Nothing => self.awaited == *later,
            Undo::Restore(replaced) => replaced.as_ref().is_some_and(|it| self.awaited.matches(it)),
        };
        let succeeded = matches!(&*self.outcome.borrow(), Some(Ok(_)));
        match self.undo {
            Undo::Restore(_) if stood && !succeeded => self.undo,
            Undo::Restore(_) | Undo::Nothing => undo,
        }
    }

    fn decide(&self, outcome: Outcome) {
        self.outcome.send_if_modified(|decided| {
            let first = decided.is_none();
            decided.get_or_insert(outcome);
            first
        });
    }
}
