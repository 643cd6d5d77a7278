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

    /// Returns whether no other transaction followed the change.
    fn holds_at(&self, generation: u32) -> bool {
        self.tables.generation == generation
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
    let Some(expected) = expected else {
        return session.read();
    };
    if !expected.holds_at(session.visit.nftables.generation()?) {
        return session.read();
    }
    let Expected { tables, routing } = expected;
    let routing = routing.map_or_else(|| session.visit.routes.read(), Ok)?;
    Ok(session.state_with(tables, routing))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{nftables::leftovers::tests::left_by_agent, rules::TableFamily};

    fn deletion() -> Change {
        Change {
            delete: vec![(TableFamily::Inet, "inpod-nat".to_owned())],
            ..Change::default()
        }
    }

    #[test]
    fn a_change_is_confirmed_by_the_next_generation_alone() {
        let before = Observed {
            generation: 7,
            ..Observed::default()
        };
        for (change, confirmed) in [(deletion(), 8), (Change::default(), 7)] {
            let expected = Expected::after(&before, &change, None).unwrap();
            let found: Vec<_> = (6..10).filter(|it| expected.holds_at(*it)).collect();
            assert_eq!(found, [confirmed]);
        }
    }

    #[test]
    fn a_change_of_rules_of_other_authors_is_read_back() {
        let before = Observed {
            leftovers: left_by_agent(),
            ..Observed::default()
        };
        assert!(Expected::after(&before, &deletion(), None).is_none());
    }
}
