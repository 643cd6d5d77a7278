use inpod_types::with_causes;

use crate::{
    error::KernelError,
    netlink::retry_on_race,
    netns_session::NetnsSession,
    nftables::{Change, NewTable, ObservedTable},
    plan::State,
    routes::Item,
    sysctl::Ports,
};

pub(super) struct Undo {
    pub(super) before: State,
    pub(super) migration_enabled: bool,
    /// The reserved ports from before, once inpod has added ztunnel's.
    pub(super) reserved_before: Option<Ports>,
    added_routing: Vec<Item>,
    pub(super) tables_written: bool,
    /// True if rules may be gone that inpod cannot write again.
    pub(super) leftovers_deleted: bool,
}

const CANNOT_UNDO: &str = "the new rules stay: what they replace was deleted with them";

impl Undo {
    pub(super) fn new(before: State) -> Self {
        Self {
            before,
            migration_enabled: false,
            reserved_before: None,
            added_routing: Vec::new(),
            tables_written: false,
            leftovers_deleted: false,
        }
    }

    /// Records an added item, unless the netns had an equal one before.
    pub(super) fn record(&mut self, item: &Item) {
        if !self.before.routing.has(item) {
            self.added_routing.push(item.clone());
        }
    }

    /// Restores the previous state in reverse order and goes on after failures. If the predecessors of the new
    /// rules may be gone, the new rules stay, because traffic would escape without any rules.
    pub(super) fn run(&self, session: &mut NetnsSession<'_>) -> Vec<String> {
        if self.leftovers_deleted {
            return vec![CANNOT_UNDO.to_owned()];
        }
        let mut failures = Vec::new();
        if self.tables_written {
            failures.extend(self.restore(session).err().map(|error| with_causes(&error)));
        }
        for item in self.added_routing.iter().rev() {
            let deleted = session.visit.routes.delete(item);
            failures.extend(deleted.err().map(|error| with_causes(&error)));
        }
        if let Some(ports) = &self.reserved_before {
            let restored = session.set_reserved_ports(ports);
            failures.extend(restored.err().map(|error| with_causes(&error)));
        }
        if self.migration_enabled {
            let disabled = session.set_migrates(false);
            failures.extend(disabled.err().map(|error| with_causes(&error)));
        }
        failures
    }

    /// Restores the previous tables, and retries after a concurrent change.
    fn restore(&self, session: &mut NetnsSession<'_>) -> Result<(), KernelError> {
        let nftables = &mut session.visit.nftables;
        retry_on_race(|| {
            let now = nftables.read()?;
            let change = restoring_change(&now.tables, &self.before.nftables.tables);
            nftables.change(now.generation, &change)
        })
    }
}

/// Returns the change back to the previous tables. Omits unchanged tables, because the kernel would refuse a
/// refused step again.
fn restoring_change(now: &[ObservedTable], before: &[ObservedTable]) -> Change {
    let changed = now.iter().filter(|table| !before.contains(table));
    let gone = before.iter().filter(|table| !now.contains(table));
    Change {
        delete: changed.map(|found| found.table.id()).collect(),
        create: gone.map(as_new).collect(),
        ..Change::default()
    }
}

fn as_new(observed: &ObservedTable) -> NewTable {
    NewTable {
        table: observed.table.clone(),
        comment: observed.comment.clone().unwrap_or_default(),
    }
}
