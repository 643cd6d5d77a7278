//! Makes a netns hold exactly one redirection, compares, tells what it would do, and takes it away: reads everything,
//! decides (`plan`), does it step by step, and reads everything back.

mod observe;
mod remove;
mod undo;

pub use observe::Observation;
pub use remove::{Phase, Removed};

use inpod_linux::Netns;
use inpod_types::SandboxRef;

use crate::{
    backend::{Backend, BackendError, Change, Observed},
    error::{ApplyError, VerifyError},
    family::Family,
    inspect::{self, Connections},
    iptables::Programs,
    netlink::KernelError,
    netns_session::{NetnsSession, ReachError},
    plan::{self, Plan, State, Step},
    rules::{Fingerprint, Form, Ipv6, Redirection, Ruleset, Tag},
    sysctl::Sysctls,
};
use undo::Undo;

/// How often a change is tried while others keep changing the netns's tables.
const ATTEMPTS: usize = 8;

/// Writes rules: with which backend, and by which programs.
#[derive(Clone, Debug)]
pub struct Writer {
    /// With which backend every pod is written, if that was configured. One that is written with another is changed.
    pub configured: Option<Backend>,
    /// With which one a pod is written that is written with none.
    pub detected: Backend,
    /// The programs of iptables.
    pub programs: Programs,
    /// The way to pods' sysctls. To be shared: what it keeps makes the next pod cheaper.
    pub sysctls: Sysctls,
}

/// By nf_tables, without any program.
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

/// What an apply came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Applied {
    /// Identifies the rules.
    pub fingerprint: Fingerprint,
    /// What they are written with.
    pub backend: Backend,
    /// Whether anything had to be written.
    pub changed: bool,
    /// Connections from before that go past ztunnel, where those are kept; 0 where they are not.
    pub direct_flows: u32,
}

/// What a comparison came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified {
    /// Identifies the rules that belong there.
    pub fingerprint: Fingerprint,
    /// What they are or would be written with.
    pub backend: Backend,
    /// One sentence per difference.
    pub differences: Vec<String>,
}

/// What an apply would come to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    /// The comparison.
    pub verified: Verified,
    /// What would be done, in the words of sysctl, ip, nft and iptables-restore.
    pub transaction: String,
}

impl Writer {
    /// What a pod is written with that is written with nothing.
    pub fn backend(&self) -> Backend {
        self.configured.unwrap_or(self.detected)
    }

    /// Makes the redirection of a netns exactly this, and reads it back. Where it is so already nothing is written.
    ///
    /// # Errors
    ///
    /// When the kernel or a program refuses, or holds something else afterwards. What was there before is then put
    /// back, unless it was another backend's or the incumbent's and was being deleted: then the new rules stay.
    pub fn apply(
        &self,
        netns: &Netns,
        redirection: &Redirection,
        sandbox: &SandboxRef,
    ) -> Result<Applied, ApplyError> {
        let (plan, changed, proxies) = self.with_session(netns, |session| {
            let before = self.read(session)?;
            let plan = self.plan(session, &before, redirection)?;
            let changed = make_so(session, &plan, before, sandbox)?;
            let proxies = session.proxies(&plan.tables);
            Ok::<_, ApplyError>((plan, changed, proxies))
        })?;
        Ok(Applied {
            fingerprint: plan.fingerprint,
            backend: plan.backend,
            changed,
            direct_flows: if redirection.keeps_existing() {
                inspect::direct_flows(netns, &proxies)?
            } else {
                0
            },
        })
    }

    /// Compares a netns with a redirection, reading everything back.
    ///
    /// # Errors
    ///
    /// When it cannot be read, or the redirection cannot be in this netns.
    pub fn verify(
        &self,
        netns: &Netns,
        redirection: &Redirection,
    ) -> Result<Verified, VerifyError> {
        self.with_session(netns, |session| {
            let state = self.read(session)?;
            let plan = self.plan(session, &state, redirection)?;
            Ok(verified(&plan, &state))
        })
    }

    /// What an apply would do now.
    ///
    /// # Errors
    ///
    /// As of [`Self::verify`].
    pub fn preview(
        &self,
        netns: &Netns,
        redirection: &Redirection,
        sandbox: &SandboxRef,
    ) -> Result<Planned, VerifyError> {
        self.with_session(netns, |session| {
            let state = self.read(session)?;
            let plan = self.plan(session, &state, redirection)?;
            let steps = plan.steps(&state, &tag(&plan, &state, sandbox));
            Ok(Planned {
                verified: verified(&plan, &state),
                transaction: plan::print(&steps, &state, &plan, |backend, seen, change| {
                    session.script(backend, seen, change)
                }),
            })
        })
    }

    fn with_session<'a, T, E: From<ReachError>>(
        &'a self,
        netns: &'a Netns,
        work: impl FnOnce(&mut NetnsSession<'a>) -> Result<T, E>,
    ) -> Result<T, E> {
        NetnsSession::with(netns, &self.programs, &self.sysctls, work)
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
        let plan = self.plan_of(session, state, form, &ruleset, families);
        let first = redirection.of_beginnings().map(|first| first.ruleset());
        let first = first.map(|first| session.shape(plan.backend, &first));
        Ok(plan.with_first(first.unwrap_or_default()))
    }

    /// A pod keeps the backend that it is written with, unless another one was configured. Where iptables may not ask
    /// whose socket sends a packet, nf_tables does it.
    fn plan_of(
        &self,
        session: &NetnsSession<'_>,
        state: &State,
        form: Form,
        ruleset: &Ruleset,
        families: &[Family],
    ) -> Plan {
        let kept = self.configured.or_else(|| state.backend());
        let backend = if session.has_other_users() && ruleset.asks_for_owners() {
            Backend::Nftables
        } else {
            kept.unwrap_or(self.detected)
        };
        Plan::new(backend, form, session.shape(backend, ruleset), families)
    }
}

/// IPv6 is to be captured, and the netns has none.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("IPv6 is to be captured, but it is switched off in the netns")]
pub struct NoIpv6;

fn verified(plan: &Plan, state: &State) -> Verified {
    Verified {
        fingerprint: plan.fingerprint,
        backend: plan.backend,
        differences: plan.differences(state),
    }
}

/// The sysctl is switched back at the end by whoever switched it on: what a tag says of it outlives the tag.
fn tag(plan: &Plan, state: &State, sandbox: &SandboxRef) -> Tag {
    let switched_before = state.tag().is_some_and(|tag| tag.migrates);
    let migrates = switched_before || state.migrates == Some(false);
    Tag::new(plan.fingerprint, migrates, sandbox)
}

/// Whether anything had to be done for it.
fn make_so(
    session: &mut NetnsSession<'_>,
    plan: &Plan,
    before: State,
    sandbox: &SandboxRef,
) -> Result<bool, ApplyError> {
    if plan.differences(&before).is_empty() {
        return Ok(false);
    }
    let tag = tag(plan, &before, sandbox);
    let steps = plan.steps(&before, &tag);
    let mut undo = Undo::new(before);
    match forward(session, plan, &steps, &tag, &mut undo) {
        Ok(()) => Ok(true),
        Err(cause) => Err(cause.with_undo_failures(undo.run(session, plan))),
    }
}

fn forward(
    session: &mut NetnsSession<'_>,
    plan: &Plan,
    steps: &[Step],
    tag: &Tag,
    undo: &mut Undo,
) -> Result<(), ApplyError> {
    let mut left = Connections::default();
    for step in steps {
        take(session, plan, step, tag, undo, &mut left)?;
    }
    if plan.needs_address() {
        session.routes.until_led()?;
    }
    let state = session.read(plan.backend)?;
    match plan.differences(&state) {
        differences if differences.is_empty() => Ok(()),
        differences => Err(ApplyError::of_differences(differences)),
    }
}

fn take(
    session: &mut NetnsSession<'_>,
    plan: &Plan,
    step: &Step,
    tag: &Tag,
    undo: &mut Undo,
    left: &mut Connections,
) -> Result<(), ApplyError> {
    match step {
        Step::Migrate => {
            session.set_migrates(true)?;
            undo.switched = true;
        }
        Step::Add(item) => {
            session.routes.add(*item).map_err(explain)?;
            undo.added.push(*item);
        }
        Step::Adopt(item) => session.routes.adopt(*item)?,
        Step::Begin(change) => {
            undo.rewritten = true;
            let seen = undo.before.of(plan.backend).cloned().unwrap_or_default();
            write(session, &plan.first(), change, tag, &seen)?;
            undo.begun = true;
        }
        Step::ForgetStrangers(families) => {
            let carried = carried(session, plan);
            session.nftables.forget_strangers(families, &carried)?;
        }
        Step::Settle => *left = inspect::settle(session.netns, &session.proxies(&plan.tables)),
        Step::Write(change) => {
            undo.rewritten = true;
            let seen = if undo.begun {
                session.read_backend(plan.backend)?
            } else {
                undo.before.of(plan.backend).cloned().unwrap_or_default()
            };
            write(session, plan, change, tag, &seen)?;
        }
        Step::ForgetBefore(families) => {
            let carried = carried(session, plan);
            session
                .nftables
                .forget_from_before(families, left, &carried)?;
        }
        Step::ForgetCaptured(families) => session.nftables.forget_captured(families)?,
        Step::Clear(backend, change) => {
            if !undo.cleared {
                read_back(session, plan)?;
            }
            let seen = session.read_backend(*backend)?;
            undo.cleared = true;
            session.change(*backend, &seen, change)?;
        }
        Step::Delete(item) => session.routes.delete(*item)?,
        Step::ForgetNames(led) => session.nftables.forget_names(led)?,
    }
    Ok(())
}

/// Those that cannot be seen are none.
fn carried(session: &NetnsSession<'_>, plan: &Plan) -> Connections {
    let carried = inspect::carried(session.netns, &session.proxies(&plan.tables));
    carried.unwrap_or_else(|error| {
        tracing::warn!(%error, "Connections of ztunnel or a sidecar may be cut");
        Connections::default()
    })
}

/// The kernel says that the network is down, and means the interface that the route leads to.
fn explain(error: KernelError) -> ApplyError {
    if error.is(nix::Error::ENETDOWN) {
        ApplyError::LoopbackDown(error)
    } else {
        error.into()
    }
}

/// Writes the tables; again from what is there by then, when somebody else was faster.
fn write(
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

/// Before anything of another origin goes, what was written is read back.
fn read_back(session: &mut NetnsSession<'_>, plan: &Plan) -> Result<(), ApplyError> {
    match plan.table_differences(&session.read_backend(plan.backend)?) {
        differences if differences.is_empty() => Ok(()),
        differences => Err(ApplyError::of_differences(differences)),
    }
}
