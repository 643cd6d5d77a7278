use anyhow::anyhow;
use inpod_linux::Netns;
use inpod_types::{Reason, SandboxRef, with_causes};

use super::{Writer, apply_plan};
use crate::{
    conntrack,
    error::{Context as _, Failed, KernelError},
    family::Family,
    inspect,
    netlink::retry_on_race,
    netns_session::{NetnsSession, ReachError},
    nftables::{Author, Change},
    plan::{Plan, State},
    rules::{Form, ambient},
};

const ATTEMPT: &str = "cannot remove the rules";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// New connections go direct while captured connections continue; a sidecar's redirection is removed
    /// completely.
    Drain,
    /// The redirection is removed with everything else that inpod wrote.
    Final,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Removed {
    /// The number of connections that were captured at the time of removal.
    pub captured_flows: u32,
}

impl Writer {
    /// Removes as much of the redirection as the phase requires.
    ///
    /// # Errors
    ///
    /// Fails if the kernel refuses a step, or if something is left afterwards.
    pub fn remove(
        &self,
        netns: &Netns,
        sandbox: &SandboxRef,
        phase: Phase,
    ) -> Result<Removed, Failed> {
        let captured_flows = match inspect::captured_flows(netns) {
            Err(error) if error.is_missing_sock_diag() => {
                // Otherwise no pod could leave any more.
                tracing::warn!(%sandbox, "The kernel has no sock_diag; captured connections are not counted");
                0
            }
            counted => counted.context(ATTEMPT)?,
        };
        let removed = self.with_state(netns, None, |session, before| match phase {
            Phase::Drain => drain(session, before, sandbox),
            Phase::Final => remove_all(session, &before),
        });
        removed.context(ATTEMPT)?;
        Ok(Removed { captured_flows })
    }
}

/// Writes rules that capture no new connections; routes stay for captured connections. A sidecar's rules are
/// removed at once: the proxy lives as long as the pod, so there is nothing to drain.
fn drain(
    session: &mut NetnsSession<'_>,
    before: State,
    sandbox: &SandboxRef,
) -> Result<(), Failed> {
    if !before.nftables.has_rules() {
        return Ok(());
    }
    if before.is_of_sidecar() {
        return remove_all(session, &before);
    }
    let families = session.families();
    let plan = Plan::new(Form::Ambient, ambient::drain().tables, families);
    apply_plan(session, &plan, before, sandbox).map(drop)
}

/// Removes tables, ip rules, then routes, because no ip rule may refer to an empty table, and goes on after a
/// failure.
fn remove_all(session: &mut NetnsSession<'_>, seen: &State) -> Result<(), Failed> {
    let mut failures = Vec::new();
    // The tables record the ports, so the tables go later.
    let released = release_ports(session, &seen.ports_added());
    failures.extend(released.err().map(|error| with_causes(&error)));
    let mut record = |result: Result<(), KernelError>| {
        failures.extend(result.err().map(|error| with_causes(&error)));
    };
    record(delete_tables(session));
    if seen.has_incumbent() {
        for item in seen.routing.agent_items() {
            record(session.visit.routes.delete(&item));
        }
    }
    let rest = State {
        routing: session.visit.routes.read()?,
        ..seen.clone()
    };
    for item in rest.own_routing() {
        record(session.visit.routes.delete(&item));
    }
    if seen.captures_dns() {
        record(conntrack::flush_dns(session.conntrack(), &[]));
    }
    if seen.nftables.has_rules() {
        record(conntrack::flush_captured(session.conntrack(), &Family::ALL));
    }
    if seen.has_enabled_migration() {
        let disabled = session.set_migrates(false);
        failures.extend(disabled.err().map(|error| with_causes(&error)));
    }
    failures.extend(remaining(&session.read()?));
    if failures.is_empty() {
        return Ok(());
    }
    let cause = anyhow!(failures.join("; "));
    Err(Failed::new(Reason::KernelRefused, cause).with_undo_failures(failures))
}

fn release_ports(session: &mut NetnsSession<'_>, added: &[u16]) -> Result<(), ReachError> {
    let reserved = session.reserved_ports().cloned();
    match reserved.filter(|_| !added.is_empty()) {
        Some(reserved) => session.set_reserved_ports(&reserved.without(added)),
        None => Ok(()),
    }
}

/// Deletes the tables of inpod and the leftovers, and retries after a concurrent change.
fn delete_tables(session: &mut NetnsSession<'_>) -> Result<(), KernelError> {
    let nftables = &mut session.visit.nftables;
    retry_on_race(|| {
        let seen = nftables.read()?;
        let change = Change {
            delete: seen.ids(),
            leftovers: seen.leftovers.select(Author::is_replaced_by_all),
            ..Change::default()
        };
        nftables.change(seen.generation, &change)
    })
}

fn remaining(state: &State) -> Vec<String> {
    let ours = state.our_tables();
    let ours = ours.map(|table| format!("table {} is left", table.name));
    let leftovers = &state.nftables.leftovers;
    let others = [Author::Agent, Author::Inpod].map(|author| leftovers.names(author));
    let others = others.concat().into_iter();
    let others = others.map(|name| format!("{name} is left"));
    let items = state.own_routing().into_iter();
    let items = items.map(|item| format!("the {item} is left"));
    ours.chain(others).chain(items).collect()
}
