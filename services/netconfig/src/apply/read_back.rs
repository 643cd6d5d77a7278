//! Reads back what was written, and reads no more than is needed to know that the kernel holds it.

use std::{collections::HashSet, sync::Arc};

use parking_lot::Mutex;

use crate::{
    netlink::KernelError,
    netns_session::NetnsSession,
    nftables::Observed,
    plan::{self, Plan, State, Step},
    routes::Routing,
    rules::Fingerprint,
};

/// The maximum of remembered fingerprints. A node has as many as its pods differ in settings.
const MAX_FINGERPRINTS: usize = 256;

/// The fingerprints whose rules this process has read back rule by rule. The same rules written to a netns without rules
/// need no second comparison, because this kernel has returned them unchanged before.
#[derive(Clone, Debug, Default)]
pub(super) struct ReadBack(Arc<Mutex<HashSet<Fingerprint>>>);

/// The state that holds after the steps, provided that the generation of nf_tables is `tables.generation`.
#[derive(Debug)]
pub(super) struct Expected {
    tables: Observed,
    /// The routing read before the steps, unless the steps changed routing.
    routing: Option<Routing>,
}

impl ReadBack {
    pub(super) fn remember(&self, fingerprint: Fingerprint) {
        let mut known = self.0.lock();
        if known.len() >= MAX_FINGERPRINTS {
            known.clear();
        }
        known.insert(fingerprint);
    }

    /// Returns the state to expect after one transaction that wrote known rules to a netns without rules; `None` after
    /// other steps.
    pub(super) fn expected(&self, plan: &Plan, before: State, steps: &[Step]) -> Option<Expected> {
        let had_rules = !before.nftables.tables.is_empty() || !before.nftables.leftovers.is_empty();
        if had_rules || !self.0.lock().contains(&plan.fingerprint) {
            return None;
        }
        let mut change = None;
        let mut routing = Some(before.routing);
        for step in steps {
            match step {
                Step::WriteTables(tables) => change = Some(tables),
                Step::WriteNewOnly(_) | Step::AwaitClosed => return None,
                Step::Add(_) | Step::Delete(_) => routing = None,
                Step::EnableMigration
                | Step::ReservePorts(_)
                | Step::FlushUntranslated(_)
                | Step::FlushExisting(_)
                | Step::FlushDns(_) => {}
            }
        }
        // The kernel counts each transaction (nf_tables_commit in net/netfilter/nf_tables_api.c).
        let tables = Observed {
            generation: before.nftables.generation.checked_add(1)?,
            ..plan::after_change(&before.nftables, change?)
        };
        Some(Expected { tables, routing })
    }
}

/// Reads the state of the netns: only the generation and changed routing, if the generation is the expected one, and
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
