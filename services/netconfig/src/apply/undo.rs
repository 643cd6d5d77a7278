use super::ATTEMPTS;
use inpod_types::with_causes;

use crate::{
    backend::{BackendError, Change, NewTable, Observed, ObservedTable},
    netns_session::NetnsSession,
    plan::{Plan, State},
    routes::Item,
};

/// What has to be put back when an apply fails.
pub(super) struct Undo {
    pub(super) before: State,
    pub(super) switched: bool,
    pub(super) added: Vec<Item>,
    pub(super) rewritten: bool,
    /// Whether what is written first is there.
    pub(super) begun: bool,
    /// Whether anything of another origin may be gone, which nobody here can write again.
    pub(super) cleared: bool,
}

/// What is told where there is no way back.
const NO_WAY_BACK: &str = "the new rules stay, for what they replace was being deleted already";

impl Undo {
    pub(super) fn new(before: State) -> Self {
        Self {
            before,
            switched: false,
            added: Vec::new(),
            rewritten: false,
            begun: false,
            cleared: false,
        }
    }

    /// In reverse; what fails is told and the rest goes on. What replaces something that may be gone by now was read
    /// back before, and stays: without it traffic would be let out.
    pub(super) fn run(&self, session: &mut NetnsSession<'_>, plan: &Plan) -> Vec<String> {
        if self.cleared {
            return vec![NO_WAY_BACK.to_owned()];
        }
        let mut failures = Vec::new();
        if self.rewritten {
            failures.extend(
                self.restore(session, plan)
                    .err()
                    .map(|error| with_causes(&error)),
            );
        }
        for item in self.added.iter().rev() {
            let deleted = session.routes.delete(*item);
            failures.extend(deleted.err().map(|error| with_causes(&error)));
        }
        if self.switched {
            let switched = session.set_migrates(false);
            failures.extend(switched.err().map(|error| with_causes(&error)));
        }
        failures
    }

    fn restore(&self, session: &mut NetnsSession<'_>, plan: &Plan) -> Result<(), BackendError> {
        let nothing = Observed::default();
        let before = self.before.of(plan.backend).unwrap_or(&nothing);
        change(session, plan, |now| back(&now.tables, &before.tables))
    }
}

/// From what is there to what was there before. What is as it was is left alone: of several steps some may have been
/// refused, and would be again.
fn back(now: &[ObservedTable], before: &[ObservedTable]) -> Change {
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

/// Changes the tables from what is there; again when somebody else was faster.
fn change(
    session: &mut NetnsSession<'_>,
    plan: &Plan,
    wanted: impl Fn(&Observed) -> Change,
) -> Result<(), BackendError> {
    let mut attempts = ATTEMPTS;
    loop {
        attempts -= 1;
        let now = session.read_backend(plan.backend)?;
        let change = wanted(&now);
        if change.is_empty() {
            return Ok(());
        }
        match session.change(plan.backend, &now, &change) {
            Err(error) if error.is_race() && attempts > 0 => {}
            result => return result,
        }
    }
}
