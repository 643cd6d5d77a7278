//! The desired set according to the callers: the last accepted change of each sandbox.

use std::collections::BTreeMap;

use inpod_types::{SandboxRef, Workload};

use crate::desired::Desired;

/// A removed sandbox has no workload.
#[derive(Debug, Default)]
pub(super) struct Expected(BTreeMap<SandboxRef, Option<Workload>>);

impl Expected {
    pub(super) fn change(&mut self, sandbox: &SandboxRef, workload: Option<Workload>) {
        self.0.insert(sandbox.clone(), workload);
    }

    pub(super) fn check(&self, desired: &Desired) {
        for (sandbox, workload) in &self.0 {
            let entry = desired.get(sandbox).map(|entry| &entry.workload);
            assert_eq!(entry, workload.as_ref(), "{sandbox}");
        }
    }
}
