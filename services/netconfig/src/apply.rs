//! Applies, verifies, previews and removes redirections: reads the state, plans (`plan`), executes the plan's
//! steps and reads back.

mod observe;
mod remove;
mod undo;

pub use observe::Observation;
pub use remove::{Phase, Removed};

use inpod_linux::Netns;
use inpod_types::SandboxRef;

use crate::{
    backend::{Backend, BackendError, Change, Observed},
    error::{ApplyError, NoIpv6, VerifyError},
    family::Family,
    inspect::{self, Connections, GracePeriod},
    iptables::Programs,
    netns_session::{NetnsSession, Prepared, ReachError, Visit},
    plan::{self, Plan, State, Step},
    rules::{Fingerprint, Form, Ipv6, Redirection, Ruleset, Tag},
    sysctl::Sysctls,
};
use undo::Undo;

/// For tables that another process changes at the same time.
const ATTEMPTS: usize = 8;

/// For rules that another process changes while they are applied. Each may take a grace period.
const APPLY_ATTEMPTS: usize = 3;

#[derive(Clone, Debug)]
pub struct Writer {
    /// For every pod, if configured. Pods that use another one are rewritten.
    pub configured: Option<Backend>,
    /// For pods without rules, unless one is configured.
    pub detected: Backend,
    pub programs: Programs,
    /// Shared by all pods: its cache makes each further pod cheaper.
    pub sysctls: Sysctls,
}

/// Uses nf_tables, without programs.
impl Default for Writer {
    fn default() -> Self {
        Self {
            configured: None,
            detected: Backend::Nftables,
            programs: Programs::default(),
            sysctls: Sysctls::default(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Applied {
    pub fingerprint: Fingerprint,
    pub backend: Backend,
    pub changed: bool,
    /// Existing connections that bypass ztunnel, where those are kept; otherwise 0.
    pub direct_flows: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified {
    /// Of the expected rules.
    pub fingerprint: Fingerprint,
    /// The one in use, or that an apply would use.
    pub backend: Backend,
    pub differences: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    pub verified: Verified,
    /// The steps as commands of sysctl, ip, nft, conntrack, iptables-restore.
    pub transaction: String,
}

impl Writer {
    /// Returns the backend for a pod without rules.
    pub fn backend(&self) -> Backend {
        self.configured.unwrap_or(self.detected)
    }

    /// Returns whether the kernel notifies of changes of the pods' rules.
    pub(crate) fn is_notified(&self) -> bool {
        self.backend() != Backend::IptablesLegacy
    }

    /// Applies exactly this redirection and verifies it. Writes nothing if it is already in place.
    ///
    /// # Errors
    ///
    /// When the kernel or a program refuses, or the rules differ afterwards. The previous state is then restored,
    /// unless deletion of another backend's or Istio's rules had begun: then the new rules stay.
    pub fn apply(
        &self,
        netns: &Netns,
        redirection: &Redirection,
        sandbox: &SandboxRef,
    ) -> Result<Applied, ApplyError> {
        let (applied, _) = self.apply_prepared(netns, None, redirection, sandbox)?;
        Ok(applied)
    }

    /// Returns the state that was read back, too, as [`Self::observe`] would.
    pub(crate) fn apply_prepared(
        &self,
        netns: &Netns,
        prepared: Option<Prepared>,
        redirection: &Redirection,
        sandbox: &SandboxRef,
    ) -> Result<(Applied, Observation), ApplyError> {
        let (plan, changed, seen) = self.with_state(netns, prepared, |session, before| {
            let plan = self.plan(session, &before, redirection)?;
            let (changed, after) = apply_plan(session, &plan, before, sandbox)?;
            let seen = Observation {
                tag: after.tag(),
                intact: after.tag().is_some(),
                backend: after.backend(),
                proxies: session.proxies(&plan.tables),
            };
            Ok::<_, ApplyError>((plan, changed, seen))
        })?;
        let applied = Applied {
            fingerprint: plan.fingerprint,
            backend: plan.backend,
            changed,
            direct_flows: if redirection.keeps_existing() {
                inspect::direct_flows(netns, &seen.proxies)?
            } else {
                0
            },
        };
        Ok((applied, seen))
    }

    pub fn verify(
        &self,
        netns: &Netns,
        redirection: &Redirection,
    ) -> Result<Verified, VerifyError> {
        self.verify_prepared(netns, None, redirection)
    }

    pub(crate) fn verify_prepared(
        &self,
        netns: &Netns,
        prepared: Option<Prepared>,
        redirection: &Redirection,
    ) -> Result<Verified, VerifyError> {
        self.with_state(netns, prepared, |session, state| {
            let plan = self.plan(session, &state, redirection)?;
            Ok(to_verified(&plan, &state))
        })
    }

    /// Computes what [`Self::apply`] would do now.
    pub fn preview(
        &self,
        netns: &Netns,
        redirection: &Redirection,
        sandbox: &SandboxRef,
    ) -> Result<Planned, VerifyError> {
        self.with_state(netns, None, |session, state| {
            let plan = self.plan(session, &state, redirection)?;
            let steps = plan.steps(&state, &tag_for(&plan, &state, sandbox));
            Ok(Planned {
                verified: to_verified(&plan, &state),
                transaction: plan::render(&steps, &state, &plan, |backend, seen, change| {
                    session.script(backend, seen, change)
                }),
            })
        })
    }

    /// Runs `work` with the state of a netns, which is read unless it is prepared.
    fn with_state<'a, T, E: From<ReachError> + From<BackendError>>(
        &'a self,
        netns: &'a Netns,
        prepared: Option<Prepared>,
        work: impl FnOnce(&mut NetnsSession<'a>, State) -> Result<T, E>,
    ) -> Result<T, E> {
        let (mut session, state) = match prepared {
            Some(prepared) => prepared.resume(netns, &self.programs),
            None => {
                let visit = netns.within(|| Visit::here(&self.sysctls));
                let visit = visit.map_err(ReachError::from)?;
                let mut session =
                    NetnsSession::new(netns, &self.programs, visit.map_err(ReachError::from)?);
                let state = self.read(&mut session);
                (session, state)
            }
        };
        let result = state.map_err(E::from);
        let result = result.and_then(|state| work(&mut session, state));
        session.visit.nftables.close();
        result
    }

    fn read(&self, session: &mut NetnsSession<'_>) -> Result<State, BackendError> {
        session.read(self.backend())
    }

    fn plan(
        &self,
        session: &NetnsSession<'_>,
        state: &State,
        redirection: &Redirection,
    ) -> Result<Plan, NoIpv6> {
        let ipv6 = redirection.ipv6();
        let families = match ipv6 {
            Ipv6::Off => &[Family::V4],
            Ipv6::Auto | Ipv6::On => session.families(),
        };
        if ipv6 == Ipv6::On && families.len() < Family::ALL.len() {
            return Err(NoIpv6);
        }
        let (form, ruleset) = (redirection.form(), redirection.ruleset());
        let plan = self.plan_for(session, state, form, &ruleset, families);
        let new_only = redirection.for_new_connections_only();
        let new_only =
            new_only.map(|new_only| session.normalize(plan.backend, &new_only.ruleset()));
        Ok(plan.with_new_only(new_only.unwrap_or_default()))
    }

    /// Keeps the pod's backend, unless another is configured. Where iptables cannot match socket owners,
    /// nf_tables is used instead.
    fn plan_for(
        &self,
        session: &NetnsSession<'_>,
        state: &State,
        form: Form,
        ruleset: &Ruleset,
        families: &[Family],
    ) -> Plan {
        let kept = self.configured.or_else(|| state.backend());
        let backend = if session.has_other_users() && ruleset.matches_socket_owners() {
            Backend::Nftables
        } else {
            kept.unwrap_or(self.detected)
        };
        Plan::new(backend, form, session.normalize(backend, ruleset), families)
    }
}

fn to_verified(plan: &Plan, state: &State) -> Verified {
    Verified {
        fingerprint: plan.fingerprint,
        backend: plan.backend,
        differences: plan.differences(state),
    }
}

/// Once inpod has enabled the sysctl, every later tag records it, so that removal disables it.
fn tag_for(plan: &Plan, state: &State, sandbox: &SandboxRef) -> Tag {
    let enabled_before = state.tag().is_some_and(|tag| tag.migrates);
    let migrates = enabled_before || state.migrates == Some(false);
    Tag::new(plan.fingerprint, migrates, sandbox)
}

/// Returns whether anything was changed, and the state that was read last. Starts again if another process changes
/// the rules meanwhile: connections that begin then would not be captured.
fn apply_plan(
    session: &mut NetnsSession<'_>,
    plan: &Plan,
    mut before: State,
    sandbox: &SandboxRef,
) -> Result<(bool, State), ApplyError> {
    if plan.differences(&before).is_empty() {
        return Ok((false, before));
    }
    let tag = tag_for(plan, &before, sandbox);
    let mut undo = Undo::new(before.clone());
    let mut attempts = APPLY_ATTEMPTS;
    loop {
        attempts -= 1;
        let steps = plan.steps(&before, &tag);
        let failure = match run_steps(session, plan, &steps, before, &tag, &mut undo) {
            Ok(after) => return Ok((true, after)),
            Err(failure) => failure,
        };
        let is_disturbed = matches!(failure, ApplyError::Differs { .. }) && attempts > 0;
        before = match is_disturbed.then(|| session.read(plan.backend)) {
            Some(Ok(state)) => state,
            Some(Err(_)) | None => {
                return Err(failure.with_undo_failures(undo.run(session, plan)));
            }
        };
    }
}

fn run_steps(
    session: &mut NetnsSession<'_>,
    plan: &Plan,
    steps: &[Step],
    before: State,
    tag: &Tag,
    undo: &mut Undo,
) -> Result<State, ApplyError> {
    let mut progress = Progress {
        before,
        interim: None,
        unclosed: Connections::default(),
    };
    for step in steps {
        execute(session, plan, step, tag, undo, &mut progress)?;
    }
    if plan.needs_address() {
        session.visit.routes.wait_for_address()?;
    }
    let state = session.read(plan.backend)?;
    ApplyError::unless_empty(plan.differences(&state))?;
    Ok(state)
}

/// Results of earlier steps that later ones need.
struct Progress {
    before: State,
    /// For new connections only, once written.
    interim: Option<Plan>,
    unclosed: Connections,
}

impl Progress {
    /// Returns the tables that a change is based on.
    fn seen(&self, session: &mut NetnsSession<'_>, plan: &Plan) -> Result<Observed, ApplyError> {
        match &self.interim {
            Some(interim) => read_tables(session, interim),
            None => Ok(self.before.of(plan.backend).cloned().unwrap_or_default()),
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
) -> Result<(), ApplyError> {
    match step {
        Step::EnableMigration => {
            session.set_migrates(true)?;
            undo.migration_enabled = true;
        }
        Step::Add(item) => {
            session.visit.routes.add(*item)?;
            undo.added_routing.push(*item);
        }
        Step::Adopt(item) => session.visit.routes.adopt(*item)?,
        Step::WriteNewOnly(change) => {
            undo.tables_written = true;
            let seen = progress.seen(session, plan)?;
            let interim = plan.new_only_plan();
            write_tables(session, &interim, change, tag, &seen)?;
            progress.interim = Some(interim);
        }
        Step::FlushUntranslated(families) => {
            let proxied = proxy_connections(session, plan);
            session
                .visit
                .nftables
                .flush_untranslated(families, &proxied)?;
        }
        Step::AwaitClosed => progress.unclosed = await_closed(session, plan)?,
        Step::WriteTables(change) => {
            undo.tables_written = true;
            let seen = progress.seen(session, plan)?;
            write_tables(session, plan, change, tag, &seen)?;
        }
        Step::FlushExisting(families) => {
            let proxied = proxy_connections(session, plan);
            let unclosed = &progress.unclosed;
            session
                .visit
                .nftables
                .flush_existing(families, unclosed, &proxied)?;
        }
        Step::FlushCaptured(families) => session.visit.nftables.flush_captured(families)?,
        Step::DeleteLeftovers(backend, change) => {
            if !undo.leftovers_deleted {
                read_tables(session, plan)?;
            }
            let seen = session.read_backend(*backend)?;
            undo.leftovers_deleted = true;
            session.change(*backend, &seen, change)?;
        }
        Step::Delete(item) => session.visit.routes.delete(*item)?,
        Step::FlushDns(captured) => session.visit.nftables.flush_dns(captured)?,
    }
    Ok(())
}

/// Fails as soon as what captures new connections is changed. iptables-legacy has no generation: its tables are
/// compared at the end only.
fn await_closed(session: &mut NetnsSession<'_>, plan: &Plan) -> Result<Connections, ApplyError> {
    let interim = plan.new_only_plan();
    let mut period = GracePeriod::begin(session.netns, session.proxies(&plan.tables));
    let mut compared = None;
    while period.goes_on() {
        let generation = session.visit.nftables.generation()?;
        if compared.replace(generation) != Some(generation) {
            read_tables(session, &interim)?;
        }
        let routing = session.visit.routes.read()?;
        ApplyError::unless_empty(interim.missing_routing(&routing))?;
    }
    Ok(period.unclosed())
}

/// Returns none if they cannot be listed.
fn proxy_connections(session: &NetnsSession<'_>, plan: &Plan) -> Connections {
    let proxied = inspect::proxied(session.netns, &session.proxies(&plan.tables));
    proxied.unwrap_or_else(|error| {
        tracing::warn!(%error, "Cannot list the connections of ztunnel or the sidecar; some may be cut");
        Connections::default()
    })
}

/// Starts again from the current tables after a concurrent change.
fn write_tables(
    session: &mut NetnsSession<'_>,
    plan: &Plan,
    first: &Change,
    tag: &Tag,
    seen: &Observed,
) -> Result<(), ApplyError> {
    let mut result = session.change(plan.backend, seen, first);
    for _ in 1..ATTEMPTS {
        match &result {
            Err(error) if error.is_race() => {}
            Ok(()) | Err(_) => break,
        }
        let seen = session.read_backend(plan.backend)?;
        let change = plan.write(&seen, tag);
        result = session.change(plan.backend, &seen, &change);
    }
    Ok(result?)
}

/// Fails if they are not those of the plan.
fn read_tables(session: &mut NetnsSession<'_>, plan: &Plan) -> Result<Observed, ApplyError> {
    let seen = session.read_backend(plan.backend)?;
    ApplyError::unless_empty(plan.table_differences(&seen))?;
    Ok(seen)
}
