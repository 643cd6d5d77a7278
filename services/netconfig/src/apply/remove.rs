use anyhow::anyhow;
use inpod_linux::Netns;
use inpod_types::{Reason, SandboxRef, with_causes};

use super::{
    Observation, Writer,
    observe::of_state,
    read_back::{self, Expected},
};
use crate::{
    conntrack,
    error::{Context as _, Failed, KernelError},
    family::Family,
    inspect,
    netlink::retry_on_race,
    netns_session::{NetnsSession, ReachError},
    nftables::{Author, Change, Observed},
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
        let removed = self.remove_and_observe(netns, sandbox, phase);
        removed.map(|(removed, _)| removed)
    }

    /// Removes like [`Self::remove`], and also returns the state read back, as [`Self::observe`] would.
    pub(crate) fn remove_and_observe(
        &self,
        netns: &Netns,
        sandbox: &SandboxRef,
        phase: Phase,
    ) -> Result<(Removed, Observation), Failed> {
        let removed = self.with_state(netns, None, |session, before| {
            let captured_flows = count_captured_flows(session, sandbox)?;
            let after = match phase {
                Phase::Drain => self.drain(session, before, sandbox),
                Phase::Final => remove_all(session, &before),
            };
            Ok((Removed { captured_flows }, of_state(session, &after?)?))
        });
        removed.context(ATTEMPT)
    }

    /// Writes rules that capture no new connections; routes stay for captured connections. A sidecar's rules are
    /// removed at once: the proxy lives as long as the pod, so there is nothing to drain. Returns the state read last.
    fn drain(
        &self,
        session: &mut NetnsSession<'_>,
        before: State,
        sandbox: &SandboxRef,
    ) -> Result<State, Failed> {
        if !before.nftables.has_rules() {
            return Ok(before);
        }
        if before.is_of_sidecar() {
            return remove_all(session, &before);
        }
        let families = session.families();
        let plan = Plan::new(Form::Ambient, ambient::drain().tables, families);
        let (_, after) = self.apply_plan(session, &plan, before, sandbox)?;
        Ok(after)
    }
}

/// Counts the captured connections, and none if the kernel has no sock_diag: otherwise no pod could leave any more.
fn count_captured_flows(
    session: &mut NetnsSession<'_>,
    sandbox: &SandboxRef,
) -> Result<u32, Failed> {
    let counted = match &mut session.visit.sockets {
        Some(socket) => inspect::captured_flows_on(socket),
        // A further attempt to open the socket shows why the visit has none.
        None => inspect::captured_flows(session.netns),
    };
    match counted {
        Err(error) if error.is_missing_sock_diag() => {
            tracing::warn!(%sandbox, "The kernel has no sock_diag; captured connections are not counted");
            Ok(0)
        }
        counted => Ok(counted?),
    }
}

/// Removes tables, ip rules, then routes, because no ip rule may refer to an empty table, and goes on after a
/// failure. Returns the state read back.
fn remove_all(session: &mut NetnsSession<'_>, seen: &State) -> Result<State, Failed> {
    let mut failures = Vec::new();
    // The tables record the ports, so the tables go later.
    let released = release_ports(session, &seen.ports_added());
    failures.extend(released.err().map(|error| with_causes(&error)));
    let mut record = |result: Result<(), KernelError>| {
        failures.extend(result.err().map(|error| with_causes(&error)));
    };
    record(delete_tables(session, &seen.nftables));
    let mut rest = seen.clone();
    if seen.has_incumbent() {
        for item in seen.routing.agent_items() {
            record(session.visit.routes.delete(&item));
        }
        rest.routing = session.visit.routes.read()?;
    }
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
    let expected = Expected::after(&seen.nftables, &deletion(&seen.nftables), None);
    let after = read_back::read(session, expected)?;
    failures.extend(remaining(&after));
    if failures.is_empty() {
        return Ok(after);
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

/// Deletes the tables of inpod and the leftovers, and starts again from the current tables after a concurrent change.
fn delete_tables(session: &mut NetnsSession<'_>, seen: &Observed) -> Result<(), KernelError> {
    let nftables = &mut session.visit.nftables;
    let mut known = Some(seen.clone());
    retry_on_race(|| {
        let seen = known.take().map_or_else(|| nftables.read(), Ok)?;
        nftables.change(seen.generation, &deletion(&seen))
    })
}

fn deletion(seen: &Observed) -> Change {
    Change {
        delete: seen.ids(),
        leftovers: seen.leftovers.select(Author::is_replaced_by_all),
        ..Change::default()
    }
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
