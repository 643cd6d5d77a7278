//! Applies, verifies, previews and removes redirections: reads the state, plans (`plan`), executes the plan's
//! steps and reads back.

mod observe;
mod read_back;
mod remove;
mod undo;

pub use observe::Observation;
pub use remove::{Phase, Removed};

use std::sync::{Arc, OnceLock};

use anyhow::anyhow;
use inpod_linux::Netns;
use inpod_types::{Reason, SandboxRef};

use crate::{
    conflicts::require_ztunnel,
    conntrack,
    error::{Context as _, Failed, KernelCause, require_none},
    family::Family,
    inspect::{self, Connections, GracePeriod},
    kernel_option,
    netlink::retry_on_race,
    netns_session::{NetnsSession, Prepared, ReachError, Visit},
    nftables::{Change, Observed},
    plan::{self, Plan, State, Step},
    routes::Routing,
    rules::{Fingerprint, Ipv6, Redirection, Table, Tag},
    sysctl::Sysctls,
};
use read_back::ReadBack;
use undo::Undo;

/// Limits the restarts, each of which may take a grace period, while another process changes rules as they are
/// applied.
const APPLY_ATTEMPTS: usize = 3;

#[derive(Clone, Debug, Default)]
pub struct Writer {
    /// The sysctls are shared by all pods, because their cache makes each further pod cheaper.
    pub sysctls: Sysctls,
    missing_for_guard: Arc<OnceLock<Option<&'static str>>>,
    read_back: ReadBack,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Applied {
    pub fingerprint: Fingerprint,
    pub changed: bool,
    /// The number of existing connections bypassing ztunnel if the redirection keeps existing connections;
    /// otherwise 0.
    pub direct_flows: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified {
    /// The fingerprint of the expected rules, even if the observed rules differ.
    pub fingerprint: Fingerprint,
    pub differences: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    pub verified: Verified,
    /// The steps as commands of sysctl, ip, nft and conntrack.
    pub transaction: String,
}

impl Applied {
    /// Counts the connections bypassing ztunnel if the redirection keeps existing connections. The rules stay applied
    /// after a failure.
    pub(crate) fn count_direct_flows(
        self,
        netns: &Netns,
        redirection: &Redirection,
        seen: &Observation,
    ) -> Result<Self, Failed> {
        if !redirection.keeps_existing() {
            return Ok(self);
        }
        let counted = inspect::direct_flows(netns, &seen.proxies);
        let direct_flows = counted.context("the rules are applied")?;
        Ok(Self {
            direct_flows,
            ..self
        })
    }
}

/// The kernel accepted the rules, but reading back shows other rules.
#[derive(Debug, thiserror::Error)]
#[error("the kernel holds other rules than were written: {}", .0.join("; "))]
struct Differs(Vec<String>);

impl KernelCause for Differs {}

impl Writer {
    /// Applies exactly the given redirection and verifies the result. Writes nothing if the redirection is already
    /// in place.
    ///
    /// # Errors
    ///
    /// Fails if the kernel refuses a step, or if the rules differ afterwards. A failed call restores the previous
    /// state, unless rules of Istio were deleted: then the new rules stay.
    pub fn apply(
        &self,
        netns: &Netns,
        redirection: &Redirection,
        sandbox: &SandboxRef,
    ) -> Result<Applied, Failed> {
        let (applied, seen) = self.apply_prepared(netns, None, redirection, false, sandbox)?;
        applied.count_direct_flows(netns, redirection, &seen)
    }

    /// Applies like [`Self::apply`] without counting connections, and also returns the state read back, as
    /// [`Self::observe`] would. With `requires_listeners`, nothing is written unless ztunnel listens where the rules lead.
    pub(crate) fn apply_prepared(
        &self,
        netns: &Netns,
        prepared: Option<Prepared>,
        redirection: &Redirection,
        requires_listeners: bool,
        sandbox: &SandboxRef,
    ) -> Result<(Applied, Observation), Failed> {
        let applied = self.with_state(netns, prepared, |session, before| {
            let plan = self.plan_for(session, redirection)?;
            if requires_listeners && let Some(sockets) = &mut session.visit.sockets {
                require_ztunnel(sockets, &plan.tables)?;
            }
            let (changed, after) = self.apply_plan(session, &plan, before, sandbox)?;
            let seen = Observation {
                tag: after.tag(),
                intact: after.tag().is_some(),
                lacks_loopback: false,
                has_rules: true,
                proxies: session.proxies(&plan.tables),
                uncaptured_udp_flows: Some(after.nftables.uncaptured_udp_flows()),
            };
            let applied = Applied {
                fingerprint: plan.fingerprint,
                changed,
                direct_flows: 0,
            };
            Ok((applied, seen))
        });
        applied.context("cannot apply the rules")
    }

    pub fn verify(&self, netns: &Netns, redirection: &Redirection) -> Result<Verified, Failed> {
        self.verify_prepared(netns, None, redirection)
    }

    pub(crate) fn verify_prepared(
        &self,
        netns: &Netns,
        prepared: Option<Prepared>,
        redirection: &Redirection,
    ) -> Result<Verified, Failed> {
        self.with_state(netns, prepared, |session, state| {
            let plan = self.plan_for(session, redirection)?;
            Ok(to_verified(&plan, &state))
        })
    }

    /// Computes the steps that [`Self::apply`] would execute now, without executing them.
    pub fn preview(
        &self,
        netns: &Netns,
        redirection: &Redirection,
        sandbox: &SandboxRef,
    ) -> Result<Planned, Failed> {
        self.with_state(netns, None, |session, state| {
            let plan = self.plan_for(session, redirection)?;
            let steps = plan.steps(&state, &tag_for(&plan, &state, sandbox));
            Ok(Planned {
                verified: to_verified(&plan, &state),
                transaction: plan::render(&steps),
            })
        })
    }

    /// Runs `work` with the state of a netns, and reads the state unless `prepared` already holds a copy.
    fn with_state<'a, T>(
        &'a self,
        netns: &'a Netns,
        prepared: Option<Prepared>,
        work: impl FnOnce(&mut NetnsSession<'a>, State) -> Result<T, Failed>,
    ) -> Result<T, Failed> {
        let (mut session, state) = match prepared {
            Some(prepared) => prepared.resume(netns),
            None => {
                let visit = netns.within(|| Visit::here(&self.sysctls));
                let visit = visit.map_err(ReachError::from)?;
                let mut session = NetnsSession::new(netns, visit.map_err(ReachError::from)?);
                let state = session.read();
                (session, state)
            }
        };
        let result = state.context("cannot read the rules");
        let result = result.and_then(|state| work(&mut session, state));
        session.visit.nftables.close();
        result
    }

    fn plan_for(
        &self,
        session: &NetnsSession<'_>,
        redirection: &Redirection,
    ) -> Result<Plan, Failed> {
        let ipv6 = redirection.ipv6();
        let families = match ipv6 {
            Ipv6::Off => &[Family::V4],
            Ipv6::Auto | Ipv6::On => session.families(),
        };
        if ipv6 == Ipv6::On && families.len() < Family::ALL.len() {
            let cause = anyhow!("IPv6 capture is requested, but IPv6 is disabled in the netns");
            return Err(Failed::new(Reason::Ipv6Unavailable, cause));
        }
        let tables = self.tables_for(redirection);
        let plan = Plan::new(redirection.form(), tables, families);
        let new_only = redirection.for_new_connections_only();
        let new_only = new_only.map(|new_only| self.tables_for(&new_only));
        Ok(plan.with_new_only(new_only.unwrap_or_default()))
    }

    fn tables_for(&self, redirection: &Redirection) -> Vec<Table> {
        let ruleset = redirection.ruleset();
        if ruleset.has_guard() && self.missing_for_guard().is_some() {
            return ruleset.without_guard().tables;
        }
        ruleset.tables
    }

    /// Returns the missing option if this kernel cannot refuse packets by the mark of the receiver. Asks the kernel
    /// once.
    pub(crate) fn missing_for_guard(&self) -> Option<&'static str> {
        *self.missing_for_guard.get_or_init(|| {
            let missing = kernel_option::missing_for_guard();
            if let Some(option) = missing {
                tracing::warn!(
                    option,
                    "The kernel lacks an option. If another process than ztunnel listens on ztunnel's ports in a pod, the \
                     process gets DNS queries by UDP, and connections time out instead of being refused"
                );
            }
            missing
        })
    }
}

fn to_verified(plan: &Plan, state: &State) -> Verified {
    Verified {
        fingerprint: plan.fingerprint,
        differences: plan.differences(state),
    }
}

/// Returns the tag for the rules. Once inpod has changed sysctls, every later tag records the changes, so that removal
/// undoes the changes.
fn tag_for(plan: &Plan, state: &State, sandbox: &SandboxRef) -> Tag {
    let migrates = state.has_enabled_migration() || state.migrates == Some(false);
    let mut reserved = state.ports_added();
    reserved.extend(plan.ports_to_reserve(state));
    Tag {
        reserved,
        ..Tag::new(plan.fingerprint, migrates, sandbox)
    }
}

impl Writer {
    /// Executes the steps of a plan. Returns whether anything was changed, and the state read last. Starts again if
    /// another process changes the rules meanwhile, since connections beginning after such a change would not be
    /// captured.
    fn apply_plan(
        &self,
        session: &mut NetnsSession<'_>,
        plan: &Plan,
        mut before: State,
        sandbox: &SandboxRef,
    ) -> Result<(bool, State), Failed> {
        if plan.differences(&before).is_empty() {
            return Ok((false, before));
        }
        let tag = tag_for(plan, &before, sandbox);
        let mut undo = Undo::new(before.clone());
        let mut attempts = APPLY_ATTEMPTS;
        loop {
            attempts -= 1;
            let failure = match self.run_plan(session, plan, before, &tag, &mut undo) {
                Ok(after) => return Ok((true, after)),
                Err(failure) => failure,
            };
            let is_disturbed = failure.cause::<Differs>().is_some() && attempts > 0;
            before = match is_disturbed.then(|| session.read()) {
                Some(Ok(state)) => state,
                Some(Err(_)) | None => {
                    return Err(failure.with_undo_failures(undo.run(session)));
                }
            };
        }
    }

    fn run_plan(
        &self,
        session: &mut NetnsSession<'_>,
        plan: &Plan,
        before: State,
        tag: &Tag,
        undo: &mut Undo,
    ) -> Result<State, Failed> {
        let wanted = before.routing.items(&plan.routing);
        wanted.map_err(|blocked| Failed::new(Reason::RoutingTaken, blocked))?;
        let steps = plan.steps(&before, tag);
        let mut progress = Progress {
            routing: Some(before.routing.clone()),
            before,
            interim: None,
            unclosed: Connections::default(),
        };
        for step in &steps {
            execute(session, plan, step, tag, undo, &mut progress)?;
        }
        if plan.needs_address() {
            session.visit.routes.wait_for_address()?;
        }
        let Progress {
            before, routing, ..
        } = progress;
        let written = self
            .read_back
            .expected(plan, &before.nftables, &steps, routing);
        let state = read_back::read(session, written)?;
        require_none(plan.differences(&state), Differs)?;
        self.read_back.remember(plan.fingerprint);
        Ok(state)
    }
}

/// Results of earlier steps, needed by later ones.
struct Progress {
    before: State,
    /// The routing after the steps so far; `None` unless the kernel has acknowledged each item as new.
    routing: Option<Routing>,
    /// The plan for new connections only, once its rules are written.
    interim: Option<Plan>,
    unclosed: Connections,
}

impl Progress {
    /// Returns the observed tables on which a change is based.
    fn seen(&self, session: &mut NetnsSession<'_>) -> Result<Observed, Failed> {
        match &self.interim {
            Some(interim) => read_tables(session, interim),
            None => Ok(self.before.nftables.clone()),
        }
    }
}

fn execute(
    session: &mut NetnsSession<'_>,
    plan: &Plan,
    step: &Step,
    tag: &Tag,
    undo: &mut Undo,
    progress: &mut Progress,
) -> Result<(), Failed> {
    match step {
        Step::EnableMigration => {
            session.set_migrates(true)?;
            undo.migration_enabled = true;
        }
        Step::ReservePorts(ports) => {
            undo.reserved_before = session.reserved_ports().cloned();
            if let Err(error) = session.set_reserved_ports(ports) {
                tracing::warn!(%error, "Cannot reserve ztunnel's ports; a socket may get one of the ports by chance");
            }
        }
        Step::Add(item) => {
            let is_new = session.visit.routes.add(item)?;
            undo.record(item);
            let routing = progress.routing.take().filter(|_| is_new);
            progress.routing = routing.map(|routing| routing.with(item));
        }
        Step::WriteNewOnly(change) => {
            undo.tables_written = true;
            let seen = progress.seen(session)?;
            let interim = plan.new_only_plan();
            undo.leftovers_deleted |= write_tables(session, &interim, change, tag, &seen)?;
            progress.interim = Some(interim);
        }
        Step::FlushUntranslated(families) => {
            let proxied = proxy_connections(session, plan);
            conntrack::flush_untranslated(session.conntrack(), families, &proxied)?;
        }
        Step::AwaitClosed => progress.unclosed = await_closed(session, plan)?,
        Step::WriteTables(change) => {
            undo.tables_written = true;
            let seen = progress.seen(session)?;
            undo.leftovers_deleted |= write_tables(session, plan, change, tag, &seen)?;
        }
        Step::FlushExisting(families) => {
            let proxied = proxy_connections(session, plan);
            let unclosed = &progress.unclosed;
            conntrack::flush_existing(session.conntrack(), families, unclosed, &proxied)?;
        }
        Step::Delete(item) => {
            progress.routing = None;
            session.visit.routes.delete(item)?;
        }
        Step::FlushDns(captured) => conntrack::flush_dns(session.conntrack(), captured)?,
    }
    Ok(())
}

/// Waits until existing connections have closed or the grace period is over. Fails as soon as another process
/// changes the interim rules or routing, which capture new connections.
fn await_closed(session: &mut NetnsSession<'_>, plan: &Plan) -> Result<Connections, Failed> {
    let interim = plan.new_only_plan();
    let mut period = GracePeriod::begin(session.netns, session.proxies(&plan.tables));
    let mut compared = None;
    while period.goes_on() {
        let generation = session.visit.nftables.generation()?;
        if compared.replace(generation) != Some(generation) {
            read_tables(session, &interim)?;
        }
        let routing = session.visit.routes.read()?;
        require_none(interim.missing_routing(&routing), Differs)?;
    }
    Ok(period.unclosed())
}

/// Returns the connections of ztunnel or the sidecar's proxy, and none if the kernel cannot list connections.
fn proxy_connections(session: &NetnsSession<'_>, plan: &Plan) -> Connections {
    let proxied = inspect::proxied(session.netns, &session.proxies(&plan.tables));
    proxied.unwrap_or_else(|error| {
        tracing::warn!(%error, "Cannot list the connections of ztunnel or the sidecar; some may be cut");
        Connections::default()
    })
}

/// Writes the tables, and starts again from the current tables after a concurrent change. Returns whether the
/// transaction also deleted leftovers.
fn write_tables(
    session: &mut NetnsSession<'_>,
    plan: &Plan,
    first: &Change,
    tag: &Tag,
    seen: &Observed,
) -> Result<bool, Failed> {
    let nftables = &mut session.visit.nftables;
    // The state and the change of the first attempt are known.
    let mut known = Some((seen.generation, first.clone()));
    let deletes_leftovers = retry_on_race(|| {
        let (generation, change) = match known.take() {
            Some(known) => known,
            None => {
                let seen = nftables.read()?;
                (seen.generation, plan.write(&seen, tag))
            }
        };
        nftables.change(generation, &change)?;
        Ok(!change.leftovers.is_empty())
    })?;
    Ok(deletes_leftovers)
}

/// Reads the tables, and fails if the tables differ from the plan.
fn read_tables(session: &mut NetnsSession<'_>, plan: &Plan) -> Result<Observed, Failed> {
    let seen = session.visit.nftables.read()?;
    require_none(plan.table_differences(&seen), Differs)?;
    Ok(seen)
}

#[cfg(test)]
mod tests {
    use inpod_linux::Netns;

    use super::*;
    use crate::rules::Ambient;

    #[test]
    fn a_kernel_without_an_option_of_the_guard_gets_the_other_rules() {
        let lacking = Writer {
            missing_for_guard: Arc::new(OnceLock::from(Some("CONFIG_NFT_SOCKET"))),
            ..Writer::default()
        };
        let redirection = Redirection::Ambient(Ambient::default());
        let netns = Netns::create().unwrap();
        let sandbox = SandboxRef {
            network_name: "net".parse().unwrap(),
            container_id: "c1".parse().unwrap(),
            ifname: "eth0".parse().unwrap(),
        };
        lacking.apply(&netns, &redirection, &sandbox).unwrap();
        let verified = lacking.verify(&netns, &redirection).unwrap();
        assert_eq!(verified.differences, [""; 0]);
        let complete = Writer::default().verify(&netns, &redirection).unwrap();
        let is_missing = |it: &String| it == "chain inpod-mangle input is missing";
        assert!(complete.differences.iter().any(is_missing), "{complete:?}");
    }
}
