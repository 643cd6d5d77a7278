//! Reads back what was written, and reads no more than is needed to know that the kernel holds it.

use std::{collections::HashSet, sync::Arc};

use parking_lot::Mutex;

use crate::{
    netlink::KernelError,
    netns_session::NetnsSession,
    nftables::{Change, Observed},
    plan::{self, Plan, State, Step},
    routes::Routing,
    rules::Fingerprint,
};

/// The maximum of remembered fingerprints. A node has as many as its pods differ in settings.
const MAX_FINGERPRINTS: usize = 256;

/// The fingerprints whose rules this process has read back rule by rule. The same rules need no second comparison,
/// because this kernel has returned them unchanged before.
#[derive(Clone, Debug, Default)]
pub(super) struct ReadBack(Arc<Mutex<HashSet<Fingerprint>>>);

/// The state that holds after a change, provided that the generation of nf_tables is `tables.generation`: the kernel
/// counts each transaction (nf_tables_commit in net/netfilter/nf_tables_api.c), and refuses one that is based on another
/// generation than the one that was read.
#[derive(Debug)]
pub(super) struct Expected {
    tables: Observed,
    /// The routing after the change; `None` if it has to be read.
    routing: Option<Routing>,
}

impl Expected {
    /// Returns `None` if the change deletes rules of other authors, of which the netns may keep something.
    pub(super) fn after(
        before: &Observed,
        change: &Change,
        routing: Option<Routing>,
    ) -> Option<Self> {
        let transactions = u32::from(!change.is_empty());
        let tables = Observed {
            generation: before.generation.checked_add(transactions)?,
            ..plan::after_change(before, change)
        };
        before
            .leftovers
            .is_empty()
            .then_some(Self { tables, routing })
    }
}

impl ReadBack {
    pub(super) fn remember(&self, fingerprint: Fingerprint) {
        let mut known = self.0.lock();
        if known.len() >= MAX_FINGERPRINTS {
            known.clear();
        }
        known.insert(fingerprint);
    }

    /// Returns the state to expect after one transaction that wrote known rules; `None` after other steps.
    pub(super) fn expected(
        &self,
        plan: &Plan,
        before: &Observed,
        steps: &[Step],
        routing: Option<Routing>,
    ) -> Option<Expected> {
        if !self.0.lock().contains(&plan.fingerprint) {
            return None;
        }
        let mut change = None;
        for step in steps {
            match step {
                Step::WriteTables(tables) => change = Some(tables),
                Step::WriteNewOnly(_) | Step::AwaitClosed => return None,
                Step::Add(_)
                | Step::Delete(_)
                | Step::EnableMigration
                | Step::ReservePorts(_)
                | Step::FlushUntranslated(_)
                | Step::FlushExisting(_)
                | Step::FlushDns(_) => {}
            }
        }
        Expected::after(before, change?, routing)
    }
}

/// Reads the state of the netns: only the generation and unknown routing, if the generation is the expected one, and
/// everything otherwise.
pub(super) fn read(
    session: &mut NetnsSession<'_>,
    expected: Option<Expected>,
) -> Result<State, KernelError> {
    let Some(Expected { tables, routing }) = expected else {
        return session.read();
    };
    let routing = routing.map_or_else(|| session.visit.routes.read(), Ok)?;
    if session.visit.nftables.generation()? != tables.generation {
        return session.read();
    }
    Ok(session.state_with(tables, routing))
}
