use super::ATTEMPTS;
use crate::{
    backend::{BackendError, Change, NewTable, Observed, ObservedTable},
    error::chain,
    link::Link,
    plan::{Plan, State},
    routes::Item,
};

/// What has to be put back when an apply fails.
pub(super) struct Undo {
    pub(super) before: State,
    pub(super) switched: bool,
    pub(super) added: Vec<Item>,
    pub(super) rewritten: bool,
}

impl Undo {
    pub(super) fn new(before: State) -> Self {
        Self {
            before,
            switched: false,
            added: Vec::new(),
            rewritten: false,
        }
    }

    /// In reverse; what fails is told and the rest goes on.
    pub(super) fn run(&self, link: &mut Link<'_>, plan: &Plan) -> Vec<String> {
        let mut failures = Vec::new();
        if self.rewritten {
            failures.extend(self.restore(link, plan).err().map(|error| chain(&error)));
        }
        for item in self.added.iter().rev() {
            let deleted = link.routes.delete(*item);
            failures.extend(deleted.err().map(|error| chain(&error)));
        }
        if self.switched {
            let switched = link.set_migrates(false);
            failures.extend(switched.err().map(|error| chain(&error)));
        }
        failures
    }

    fn restore(&self, link: &mut Link<'_>, plan: &Plan) -> Result<(), BackendError> {
        let nothing = Observed::default();
        let before = self.before.of(plan.backend).unwrap_or(&nothing);
        if link.read_of(plan.backend)?.tables == before.tables {
            return Ok(());
        }
        change(link, plan, |now| Change {
            delete: now.ids(),
            create: before.tables.iter().map(as_new).collect(),
            delete_incumbent: false,
        })
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
    link: &mut Link<'_>,
    plan: &Plan,
    wanted: impl Fn(&Observed) -> Change,
) -> Result<(), BackendError> {
    let mut attempts = ATTEMPTS;
    loop {
        attempts -= 1;
        let now = link.read_of(plan.backend)?;
        match link.change(plan.backend, &now, &wanted(&now)) {
            Err(error) if error.is_race() && attempts > 0 => {}
            result => return result,
        }
    }
}
