use inpod_linux::Netns;
use inpod_types::{SandboxRef, with_causes};

use super::{ATTEMPTS, Writer, apply_plan};
use crate::{
    backend::{Backend, BackendError, Change},
    error::{ApplyError, RemoveError},
    family::Family,
    inspect,
    netns_session::NetnsSession,
    plan::State,
    rules::{Form, ambient},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// New connections go direct, captured ones continue. A sidecar's redirection is removed completely.
    Drain,
    /// Removes all that inpod wrote.
    Final,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Removed {
    /// Connections captured at the time of removal.
    pub captured_flows: u32,
}

impl Writer {
    /// Removes as much as the phase requires.
    ///
    /// # Errors
    ///
    /// When the kernel or a program refuses, or something is left.
    pub fn remove(
        &self,
        netns: &Netns,
        sandbox: &SandboxRef,
        phase: Phase,
    ) -> Result<Removed, RemoveError> {
        let captured_flows = inspect::captured_flows(netns)?;
        self.with_state(netns, None, |session, before| match phase {
            Phase::Drain => self.drain(session, before, sandbox),
            Phase::Final => self.remove_all(session, &before),
        })?;
        Ok(Removed { captured_flows })
    }

    /// Writes rules that capture nothing new; routes stay for captured connections. A sidecar's rules go at once: its
    /// proxy lives as long as the pod, so there is nothing to drain.
    fn drain(
        &self,
        session: &mut NetnsSession<'_>,
        before: State,
        sandbox: &SandboxRef,
    ) -> Result<(), RemoveError> {
        if !before.has_rules() {
            return Ok(());
        }
        if before.is_of_sidecar() {
            return self.remove_all(session, &before);
        }
        let families = session.families();
        let plan = self.plan_for(session, &before, Form::Ambient, &ambient::drain(), families);
        apply_plan(session, &plan, before, sandbox)
            .map(drop)
            .map_err(|error: ApplyError| RemoveError::Drain(Box::new(error)))
    }

    /// Removes tables, ip rules, then routes: no ip rule may refer to an empty table. Goes on after a failure.
    fn remove_all(&self, session: &mut NetnsSession<'_>, seen: &State) -> Result<(), RemoveError> {
        let mut failures = Vec::new();
        let mut record = |result: Result<(), BackendError>| {
            failures.extend(result.err().map(|error| with_causes(&error)));
        };
        for (backend, _) in &seen.seen {
            record(delete_tables(session, *backend));
        }
        if seen.has_incumbent() {
            // Equivalents of ours were Istio's node agent's; adopting them makes them ours to delete.
            for item in seen.routing.equivalent_for_ztunnel() {
                record(session.visit.routes.adopt(item).map_err(Into::into));
            }
        }
        let rest = State {
            routing: session.visit.routes.read()?,
            ..seen.clone()
        };
        for item in rest.own_routing() {
            record(session.visit.routes.delete(item).map_err(Into::into));
        }
        if seen.captures_dns() {
            record(session.visit.nftables.flush_dns(&[]).map_err(Into::into));
        }
        if seen.has_rules() {
            record(
                session
                    .visit
                    .nftables
                    .flush_captured(&Family::ALL)
                    .map_err(Into::into),
            );
        }
        if seen.tag().is_some_and(|tag| tag.migrates) {
            let disabled = session.set_migrates(false);
            failures.extend(disabled.err().map(|error| with_causes(&error)));
        }
        failures.extend(remaining(&self.read(session)?));
        RemoveError::unless_empty(failures)
    }
}

/// Retries after a concurrent change.
fn delete_tables(session: &mut NetnsSession<'_>, backend: Backend) -> Result<(), BackendError> {
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

fn remaining(state: &State) -> Vec<String> {
    let mut remaining = Vec::new();
    for (backend, seen) in &state.seen {
        let ours = seen.tables.iter().map(|seen| &seen.table.name);
        remaining.extend(ours.map(|name| format!("table {name} is left in {backend}")));
        let incumbent = seen.incumbent.iter();
        remaining.extend(incumbent.map(|name| format!("{name} is left in {backend}")));
    }
    let items = state.own_routing().into_iter();
    remaining.extend(items.map(|(family, part)| format!("the {family} {part} is left")));
    remaining
}
