//! The desired set according to the expectations of the callers.

use std::collections::BTreeMap;

use inpod_types::{SandboxRef, Workload};

use crate::{
    desired::{Desired, Entry},
    outcome::Outcome,
};

/// An accepted change of a sandbox. A removal has no workload.
#[derive(Clone, Debug, Default)]
struct Change {
    serial: u64,
    workload: Option<Workload>,
}

#[derive(Debug, Default)]
struct Sandbox {
    last: Change,
    /// The change that is restored if every later add fails.
    settled: Change,
}

/// The last change of each sandbox. A failed add restores the settled change, unless another change came later.
#[derive(Debug, Default)]
pub(super) struct Expected {
    sandboxes: BTreeMap<SandboxRef, Sandbox>,
    serials: u64,
}

impl Expected {
    pub(super) fn settle(&mut self, sandbox: &SandboxRef, workload: Option<Workload>) {
        self.serials += 1;
        let serial = self.serials;
        let known = self.sandboxes.entry(sandbox.clone()).or_default();
        known.last = Change { serial, workload };
        known.settled = known.last.clone();
    }

    /// Settles the last change of every sandbox, because no caller waits any more.
    pub(super) fn settle_all(&mut self) {
        for known in self.sandboxes.values_mut() {
            known.settled = known.last.clone();
        }
    }

    pub(super) fn last_serial(&self, sandbox: &SandboxRef) -> u64 {
        self.sandboxes
            .get(sandbox)
            .map_or(0, |known| known.last.serial)
    }

    /// Adds a workload and returns the serial of the change. The change is the last change again if the add repeats the
    /// last workload and the last `outcome` is not decided.
    pub(super) fn add(&mut self, workload: Workload, outcome: Option<&Outcome>) -> u64 {
        let known = self.sandboxes.entry(workload.sandbox.clone()).or_default();
        if outcome.is_some_and(Result::is_ok) {
            known.settled = known.last.clone();
        }
        if outcome.is_some() || known.last.workload.as_ref() != Some(&workload) {
            self.serials += 1;
            known.last = Change {
                serial: self.serials,
                workload: Some(workload),
            };
        }
        known.last.serial
    }

    /// Ends an add that lost its last caller or was answered with success.
    pub(super) fn end_add(&mut self, sandbox: &SandboxRef, serial: u64, served: bool) {
        let known = self.sandboxes.get_mut(sandbox);
        match known.filter(|known| known.last.serial == serial) {
            Some(known) if served => known.settled = known.last.clone(),
            Some(known) => known.last = known.settled.clone(),
            None => {}
        }
    }

    pub(super) fn check(&self, desired: &Desired) {
        for (sandbox, known) in &self.sandboxes {
            let entry = desired.get(sandbox).map(Entry::workload);
            assert_eq!(entry, known.last.workload.as_ref(), "{sandbox}");
        }
    }
}
