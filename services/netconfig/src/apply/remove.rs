//! Takes a netns's redirection away.

use inpod_linux::Netns;
use inpod_types::{SandboxRef, with_causes};

use super::{ATTEMPTS, Writer, make_so};
use crate::{
    backend::{Backend, BackendError, Change},
    error::{ApplyError, RemoveError},
    family::Family,
    inspect,
    netns_session::NetnsSession,
    plan::State,
    rules::{Form, ambient},
};

/// How far a redirection is taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// New connections go direct, captured ones live on. Of a sidecar's redirection: nothing is left.
    Drain,
    /// Nothing of ours is left.
    Final,
}

/// What a removal came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Removed {
    /// Connections that were captured when it was done.
    pub captured_flows: u32,
}

impl Writer {
    /// Takes a netns's redirection away as far as the phase says.
    ///
    /// # Errors
    ///
    /// When the kernel or a program refuses, or something is left when it is read back.
    pub fn remove(
        &self,
        netns: &Netns,
        sandbox: &SandboxRef,
        phase: Phase,
    ) -> Result<Removed, RemoveError> {
        let captured_flows = inspect::captured_flows(netns)?;
        self.with_session(netns, |session| match phase {
            Phase::Drain => self.drain(session, sandbox),
            Phase::Final => self.remove_all(session),
        })?;
        Ok(Removed { captured_flows })
    }

    /// The rules give way to ones that capture nothing new; routes stay, for what is captured lives on. Those of a
    /// sidecar go at once: its proxy is in the pod as long as the pod is, so that there is nothing to wait for.
    fn drain(
        &self,
        session: &mut NetnsSession<'_>,
        sandbox: &SandboxRef,
    ) -> Result<(), RemoveError> {
        let before = self.read(session)?;
        if !before.has_rules() {
            return Ok(());
        }
        if before.is_of_sidecar() {
            return self.remove_all(session);
        }
        let families = session.families();
        let plan = self.plan_of(session, &before, Form::Ambient, &ambient::drain(), families);
        make_so(session, &plan, before, sandbox)
            .map(drop)
            .map_err(|error: ApplyError| RemoveError::Drain(Box::new(error)))
    }

    /// The tables, then ip rules, then routes: nothing is led to a table that is empty. What fails does not keep the
    /// rest.
    fn remove_all(&self, session: &mut NetnsSession<'_>) -> Result<(), RemoveError> {
        let seen = self.read(session)?;
        let mut failures = Vec::new();
        let mut note = |result: Result<(), BackendError>| {
            failures.extend(result.err().map(|error| with_causes(&error)));
        };
        for (backend, _) in &seen.seen {
            note(clear(session, *backend));
        }
        if seen.has_incumbent() {
            // Whatever is equal to ours was the incumbent's, and becomes ours to delete.
            for item in seen.routing.equal_for_ztunnel() {
                note(session.routes.adopt(item).map_err(Into::into));
            }
        }
        let rest = State {
            routing: session.routes.read()?,
            ..seen.clone()
        };
        for item in rest.own_routing() {
            note(session.routes.delete(item).map_err(Into::into));
        }
        if seen.captures_names() {
            note(session.nftables.forget_names(&[]).map_err(Into::into));
        }
        if seen.has_rules() {
            note(
                session
                    .nftables
                    .forget_captured(&Family::ALL)
                    .map_err(Into::into),
            );
        }
        if seen.tag().is_some_and(|tag| tag.migrates) {
            let switched = session.set_migrates(false);
            failures.extend(switched.err().map(|error| with_causes(&error)));
        }
        failures.extend(left(&self.read(session)?));
        RemoveError::unless_empty(failures)
    }
}

/// Again when somebody else was faster.
fn clear(session: &mut NetnsSession<'_>, backend: Backend) -> Result<(), BackendError> {
    let mut attempts = ATTEMPTS;
    loop {
        attempts -= 1;
        let seen = session.read_backend(backend)?;
        let change = Change {
            delete: seen.ids(),
            delete_incumbent: !seen.incumbent.is_empty(),
            ..Change::default()
        };
        if change.is_empty() {
            return Ok(());
        }
        match session.change(backend, &seen, &change) {
            Err(error) if error.is_race() && attempts > 0 => {}
            result => return result,
        }
    }
}

/// What is left, a sentence each.
fn left(state: &State) -> Vec<String> {
    let mut left = Vec::new();
    for (backend, seen) in &state.seen {
        let ours = seen.tables.iter().map(|seen| &seen.table.name);
        left.extend(ours.map(|name| format!("table {name} is left in {backend}")));
        let incumbent = seen.incumbent.iter();
        left.extend(incumbent.map(|name| format!("{name} is left in {backend}")));
    }
    let items = state.own_routing().into_iter();
    left.extend(items.map(|(family, part)| format!("the {family} {part} is left")));
    left
}
