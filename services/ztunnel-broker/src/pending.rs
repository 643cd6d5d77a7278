//! The adds that wait for an acknowledgement, and what undoes each.

use std::{collections::BTreeMap, time::Instant};

use inpod_types::{Revision, SandboxRef};
use tokio::sync::watch;

use crate::{
    desired::Entry,
    outcome::{self, Awaited, Evidence, Outcome, Unserved},
};

/// What makes an add that failed undone.
#[derive(Debug)]
pub enum Undo {
    /// Nothing: the workload was desired before, or somebody has been told that it is served.
    Nothing,
    /// What stood in its place before.
    Restore(Option<Box<Entry>>),
}

/// A place in the queue of those who wait for an add.
#[derive(Clone, Debug)]
pub struct Ticket {
    /// What is waited for.
    pub awaited: Awaited,
    /// What came of it, once that is known.
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

/// At most one add per sandbox is pending; several callers may wait for it.
#[derive(Debug, Default)]
pub struct PendingAdds {
    by_sandbox: BTreeMap<SandboxRef, Pending>,
    serials: u64,
}

impl PendingAdds {
    /// Waits for an add. A repetition joins the first call; a later word on the sandbox takes over, and what it would
    /// restore is what was there before both.
    pub fn join(&mut self, awaited: Awaited, undo: Undo) -> Ticket {
        let earlier = self.by_sandbox.remove(&awaited.sandbox);
        let pending = match earlier {
            Some(same) if same.awaited == awaited => same,
            Some(older) => {
                older.decide(Err(Unserved::Superseded));
                self.begin(awaited, older.undo)
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

    /// One who waited has gone. Returns what is to be restored: when nobody is left who waits or was told of success.
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

    /// The whole set names this sandbox: it stays, whatever becomes of the add.
    pub fn confirm(&mut self, sandbox: &SandboxRef, revision: Revision) {
        if let Some(pending) = self.by_sandbox.get_mut(sandbox)
            && pending.awaited.revision <= revision
        {
            pending.undo = Undo::Nothing;
        }
    }

    /// Decides what can be decided.
    pub fn decide(&self, evidence: &Evidence<'_>, now: Instant) {
        for pending in self.by_sandbox.values() {
            if pending.outcome.borrow().is_none()
                && let Some(outcome) = outcome::decide(evidence, &pending.awaited, now)
            {
                pending.decide(outcome);
            }
        }
    }

    /// Ends all waits; what is desired stays.
    pub fn stop(&mut self) {
        for pending in self.by_sandbox.values_mut() {
            pending.undo = Undo::Nothing;
            pending.decide(Err(Unserved::Stopping));
        }
    }
}

impl Pending {
    /// The first verdict stands.
    fn decide(&self, outcome: Outcome) {
        self.outcome.send_if_modified(|decided| {
            let first = decided.is_none();
            decided.get_or_insert(outcome);
            first
        });
    }
}
