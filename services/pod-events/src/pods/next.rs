//! The next step of a pod: a pure function of the state of the pod and of the node.
//!
//! `wishes` lists the remaining work, the most urgent first, with the reason for waiting. The next step is the first wish
//! without a reason to wait, so a waiting step delays no other step.

use std::time::Duration;

use inpod_service::UninstallMode;

use super::state::{Act, Add, Goal, Phase, Plan, Pod, Proxy, Run, Sandbox, Step};
use crate::{
    boottime::BootInstant,
    tasks::{DELETE_TIMEOUT, DISCOVERY_DELAY, GONE_GRACE, GONE_TIMEOUT, NetnsState},
};

/// The bounds of the interval between two looks at an ending netns. The interval grows with the time waited, because a
/// look takes time in proportion to the node's processes.
const LOOK_INTERVAL: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(5)];

/// The interval between two looks at a netns without effects, which only occupies memory.
const IDLE_LOOK_INTERVAL: Duration = Duration::from_secs(30);

const COUNT_INTERVAL: Duration = Duration::from_millis(500);

/// The desired state of a pod's current sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Wanted {
    In {
        proxy: Proxy,
        /// Set if the requested settings and addresses equal the applied settings and addresses.
        is_in_sync: bool,
    },
    /// Redirected to its sidecar until the sandbox ends, but unmanaged.
    Detached,
    Out,
    /// The source is complete and shows no such pod.
    Gone {
        since: BootInstant,
    },
    /// The source does not know, so nothing is changed.
    Unknown,
}

/// The source's state of a pod whose sandbox was deleted by the runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Ending {
    /// The pod is gone or ends.
    Agreed,
    /// The source is incomplete and does not show the pod.
    Unknown,
    /// The pod runs.
    Denied,
}

/// The node, as far as a pod's next step depends on it.
#[derive(Clone, Debug)]
pub(crate) struct World {
    pub(crate) now: BootInstant,
    /// The connected netconfig.
    pub(crate) netconfig: Option<Run>,
    /// The connected broker, once it has the desired set.
    pub(crate) broker: Option<Run>,
    pub(crate) wanted: Wanted,
    pub(crate) ending: Ending,
    /// Set if the source shows the current sandbox's pod.
    pub(crate) is_shown: bool,
    /// Set if the source shows another pod of the same name.
    pub(crate) has_successor: bool,
    /// Set if the source shows a running pod of the mesh, and nothing forbids the enrollment.
    pub(crate) is_searched: bool,
    pub(crate) leave: Option<UninstallMode>,
    /// Set if peers see the withdrawn annotation, or never will while the node is uninstalled.
    pub(crate) is_announced: bool,
    /// The time of the next check of the current sandbox's listeners.
    pub(crate) listener_check: Option<BootInstant>,
    pub(crate) propagation: Duration,
    pub(crate) grace: Duration,
}

/// The reason for waiting with a wish.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Wait {
    Until(BootInstant),
    Netconfig,
    Broker,
    /// The source, or the API server's answer about the annotation.
    Input,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wish {
    pub(crate) step: Step,
    pub(crate) wait: Option<Wait>,
}

/// Returns the next step: the first wish without a reason to wait, or else a rest until the earliest time.
pub(crate) fn next(pod: &Pod, world: &World) -> Step {
    let wishes = wishes(pod, world);
    if let Some(ready) = wishes.iter().find(|wish| wish.wait.is_none()) {
        return ready.step;
    }
    let times = wishes.iter().filter_map(|wish| match wish.wait {
        Some(Wait::Until(at)) => Some(at),
        Some(Wait::Netconfig | Wait::Broker | Wait::Input) | None => None,
    });
    Step::Rest(times.chain(add_times(pod, world)).min())
}

/// Returns the plan of a sandbox's step.
pub(crate) fn plan(pod: &Pod, world: &World, number: u64, act: Act) -> Option<Plan> {
    let index = pod.sandboxes.iter().position(|it| it.number == number)?;
    let view = View::of(pod, world, index)?;
    Some(Plan {
        number,
        act,
        phase: view.phase(),
        revision: view.sandbox.revision,
        reports: view.sandbox.reports,
        proxy: view.goal_proxy().unwrap_or(view.sandbox.proxy),
        stays: view.sandbox.proxy == Proxy::Sidecar || world.wanted != Wanted::Out,
        netconfig: world.netconfig.clone(),
        broker: world.broker.clone(),
    })
}

/// Returns the times when waiting ADDs have to give up, and to stop undoing.
fn add_times(pod: &Pod, world: &World) -> impl Iterator<Item = BootInstant> {
    let adds = pod.sandboxes.iter().filter_map(|it| it.add.as_ref());
    let times = adds.flat_map(|add| [add.work_deadline, add.deadline]);
    times.filter(|at| *at > world.now)
}

/// Returns the remaining work, the most urgent first.
pub(crate) fn wishes(pod: &Pod, world: &World) -> Vec<Wish> {
    let views = (0..pod.sandboxes.len()).filter_map(|index| View::of(pod, world, index));
    let views: Vec<_> = views.collect();
    let kinds: [fn(&View<'_>) -> Option<Wanting>; 7] = [
        |view| view.ending(),
        |view| view.undo(),
        |view| view.claim(),
        |view| view.verify(),
        |view| view.forward(),
        |view| view.update(),
        |view| view.listeners(),
    ];
    let mut all = Vec::new();
    for wants in kinds {
        let wishes = views
            .iter()
            .filter_map(|view| Some(view.wish(&wants(view)?)));
        all.extend(wishes);
    }
    all.extend(search(pod, world));
    all
}

/// An act needed by a sandbox, and the earliest time.
struct Wanting {
    act: Act,
    at: Option<BootInstant>,
    /// Set if the act waits for an input rather than for a time.
    needs_input: bool,
}

impl Wanting {
    fn now(act: Act) -> Option<Self> {
        Some(Self {
            act,
            at: None,
            needs_input: false,
        })
    }

    fn at(act: Act, at: BootInstant) -> Option<Self> {
        Some(Self {
            act,
            at: Some(at),
            needs_input: false,
        })
    }

    fn after_input(act: Act) -> Option<Self> {
        Some(Self {
            act,
            at: None,
            needs_input: true,
        })
    }
}

/// A sandbox in its surroundings.
struct View<'a> {
    pod: &'a Pod,
    world: &'a World,
    sandbox: &'a Sandbox,
    is_current: bool,
}

impl View<'_> {
    fn of<'a>(pod: &'a Pod, world: &'a World, index: usize) -> Option<View<'a>> {
        Some(View {
            pod,
            world,
            sandbox: pod.sandboxes.get(index)?,
            is_current: Some(index) == pod.current(),
        })
    }

    fn phase(&self) -> Phase {
        self.sandbox.phase
    }

    fn wish(&self, wanting: &Wanting) -> Wish {
        let step = Step::Take(self.sandbox.number, wanting.act);
        let retry = self.sandbox.retries.get(&wanting.act).map(|retry| retry.at);
        let at = wanting.at.max(retry).filter(|at| *at > self.world.now);
        let wait = if wanting.needs_input {
            Some(Wait::Input)
        } else if needs_netconfig(wanting.act) && self.world.netconfig.is_none() {
            Some(Wait::Netconfig)
        } else if self.needs_broker(wanting.act) && self.world.broker.is_none() {
            Some(Wait::Broker)
        } else {
            at.map(Wait::Until)
        };
        Wish { step, wait }
    }

    fn needs_broker(&self, act: Act) -> bool {
        // An enrollment begins only if it can go on.
        let proxy = if matches!(act, Act::Begin | Act::Permit) {
            self.goal_proxy()
        } else {
            Some(self.sandbox.proxy)
        };
        let is_at_broker = matches!(
            act,
            Act::Permit | Act::Begin | Act::AddWorkload | Act::Readd | Act::Withdraw | Act::Forget
        );
        is_at_broker && proxy == Some(Proxy::Ztunnel)
    }

    /// Returns the proxy to join: the ADD's decision counts until the answer.
    fn goal_proxy(&self) -> Option<Proxy> {
        match (&self.sandbox.add, self.world.wanted) {
            (Some(add), _) => match add.goal? {
                Goal::Join(proxy) => Some(proxy),
                Goal::Record => None,
            },
            (None, Wanted::In { proxy, .. }) if self.is_current => Some(proxy),
            (None, _) => None,
        }
    }

    /// Returns the ADD, unless the ADD has failed.
    fn waiting_add(&self) -> Option<&Add> {
        let add = self.sandbox.add.as_ref()?;
        (!self.is_add_failed(add)).then_some(add)
    }

    /// Returns whether an ADD can no longer succeed. With a later sandbox, the runtime has given up the earlier sandbox.
    fn is_add_failed(&self, add: &Add) -> bool {
        let is_superseded = !self.is_current && add.goal.is_some();
        let is_late = self.world.now >= add.work_deadline && add.goal != Some(Goal::Record);
        add.is_failed || is_superseded || is_late
    }

    fn is_claimed(&self) -> bool {
        let by = &self.sandbox.claimed_by;
        by.is_some() && *by == self.world.netconfig
    }

    fn is_served(&self) -> bool {
        let by = &self.sandbox.served_by;
        self.sandbox.proxy == Proxy::Sidecar || (by.is_some() && *by == self.world.broker)
    }

    fn seen(&self) -> Option<NetnsState> {
        self.sandbox.look.map(|(_, state)| state)
    }

    /// Returns a look at the netns, an interval after the last one.
    fn look_every(&self, interval: Duration) -> Option<Wanting> {
        match self.sandbox.look {
            None => Wanting::now(Act::Look),
            Some((at, _)) => Wanting::at(Act::Look, at + interval),
        }
    }

    fn look_since(&self, since: BootInstant) -> Option<Wanting> {
        let [shortest, longest] = LOOK_INTERVAL;
        let waited = self.world.now.since(since);
        self.look_every((waited / 10).clamp(shortest, longest))
    }

    /// The end of a sandbox after a DEL, and of sandboxes replaced by a later sandbox.
    fn ending(&self) -> Option<Wanting> {
        if let Phase::Deleting { since } = self.phase() {
            return self.ending_after_delete(since);
        }
        let is_replaced =
            !self.is_current && self.sandbox.is_recorded && self.sandbox.add.is_none();
        if is_replaced {
            self.ending_of_earlier()
        } else {
            None
        }
    }

    fn ending_after_delete(&self, since: BootInstant) -> Option<Wanting> {
        // The broker knows that the pod's UID belongs to a later sandbox.
        if !self.is_current || self.world.ending == Ending::Agreed {
            return Wanting::now(Act::Forget);
        }
        match self.seen() {
            Some(NetnsState::InUse) if self.is_wrong_delete(since) => Wanting::now(Act::Reject),
            None | Some(NetnsState::InUse) => self.look_since(since),
            Some(NetnsState::Gone | NetnsState::Empty | NetnsState::SandboxOnly) => {
                Wanting::now(Act::Forget)
            }
        }
    }

    fn is_wrong_delete(&self, since: BootInstant) -> bool {
        self.world.ending == Ending::Denied && self.world.now.since(since) >= DELETE_TIMEOUT
    }

    /// netconfig reports the end of a claimed sandbox, so a look is needed only if another pod has taken the name.
    fn ending_of_earlier(&self) -> Option<Wanting> {
        let phase = self.phase();
        if !self.sandbox.is_located {
            // Until the current sandbox is settled, the broker may know the pod only by the earlier sandbox.
            let current = self.pod.current().map(|index| &self.pod.sandboxes[index]);
            let is_settled = current.is_some_and(|it| it.add.is_none() && is_settled(it.phase));
            return if is_settled {
                Wanting::now(Act::Forget)
            } else {
                None
            };
        }
        let is_managed = phase.has_effects() && !self.sandbox.is_detached && !phase.is_legacy();
        let is_held = is_managed && !matches!(phase, Phase::Enrolling | Phase::Adopted);
        if is_held && !self.world.has_successor {
            return None;
        }
        match self.seen() {
            Some(NetnsState::Gone | NetnsState::Empty) => Wanting::now(Act::Forget),
            _ if is_held => self.look_every(LOOK_INTERVAL[0]),
            _ => self.look_every(IDLE_LOOK_INTERVAL),
        }
    }

    /// The undo of a failed ADD, and the answer.
    fn undo(&self) -> Option<Wanting> {
        let add = self.sandbox.add.as_ref()?;
        if !self.is_add_failed(add) {
            return None;
        }
        if self.phase() != Phase::Enrolling {
            Wanting::now(Act::Answer)
        } else if self.world.now >= add.deadline {
            Wanting::now(Act::GiveUp)
        } else {
            Wanting::now(Act::Withdraw)
        }
    }

    fn claim(&self) -> Option<Wanting> {
        let phase = self.phase();
        let is_due = phase.has_effects()
            && !phase.is_deleting()
            && self.sandbox.is_located
            && !self.is_claimed()
            && !self.is_undone()
            && !self.stays_detached()
            && !self.is_handed_over();
        if !is_due {
            return None;
        }
        self.with_permit(Act::Claim)
    }

    /// Returns whether an unfinished enrollment is being undone.
    fn is_undone(&self) -> bool {
        let is_unwanted = match &self.sandbox.add {
            Some(add) => self.is_add_failed(add),
            None => matches!(self.world.wanted, Wanted::Out | Wanted::Detached),
        };
        is_unwanted && self.phase() == Phase::Enrolling
    }

    fn stays_detached(&self) -> bool {
        self.sandbox.is_detached && self.world.leave == Some(UninstallMode::Uninstall)
    }

    fn verify(&self) -> Option<Wanting> {
        let is_due = self.sandbox.is_suspect
            && self.phase().has_rules()
            && self.is_claimed()
            && !self.is_handed_over();
        if !is_due {
            return None;
        }
        match self.pod.repairs_from {
            Some(at) if self.sandbox.add.is_none() => Wanting::at(Act::Verify, at),
            Some(_) | None => Wanting::now(Act::Verify),
        }
    }

    /// An ADD works only with a permit, except during the wait for ztunnel.
    fn with_permit(&self, act: Act) -> Option<Wanting> {
        match self.waiting_add() {
            Some(add) if !add.has_permit => Wanting::now(Act::Permit),
            Some(_) | None => Wanting::now(act),
        }
    }

    /// A handover leaves stable sandboxes to another agent; ADDs are served until the end.
    fn is_handed_over(&self) -> bool {
        self.world.leave == Some(UninstallMode::Handover)
            && self.phase().is_stable()
            && self.sandbox.add.is_none()
    }

    /// The steps towards the desired state.
    fn forward(&self) -> Option<Wanting> {
        if !self.sandbox.is_recorded || self.phase().is_deleting() || !self.is_current {
            return None;
        }
        if let Some(add) = &self.sandbox.add {
            return if self.is_add_failed(add) {
                None
            } else {
                self.towards_answer(add)
            };
        }
        if self.is_handed_over() {
            return None;
        }
        if self.sandbox.is_placeholder {
            return if self.world.is_shown {
                Wanting::now(Act::Identify)
            } else {
                None
            };
        }
        match self.world.wanted {
            Wanted::Unknown => None,
            Wanted::Gone { since } => self.towards_end(since),
            _ if self.phase() == Phase::ServedLegacy => None,
            _ if self.phase() == Phase::Legacy => self.enroll(),
            Wanted::In { .. } if self.phase() == Phase::Enrolled => None,
            Wanted::In { .. } => self.enroll(),
            Wanted::Detached => self.detach(),
            Wanted::Out => self.leave(),
        }
    }

    fn towards_answer(&self, add: &Add) -> Option<Wanting> {
        let Some(Goal::Join(_)) = add.goal else {
            return Wanting::now(Act::Answer);
        };
        let is_enrolled = self.phase() == Phase::Enrolled && !self.sandbox.is_suspect;
        if is_enrolled && self.is_claimed() && self.is_served() {
            return Wanting::now(Act::Answer);
        }
        self.enroll()
    }

    /// The parts of an enrollment in order: ztunnel's listeners come before the rules.
    fn enroll(&self) -> Option<Wanting> {
        if !self.sandbox.is_located {
            return Wanting::now(Act::Locate);
        }
        if self.phase() == Phase::Out {
            return self.with_permit(Act::Begin);
        }
        if !self.is_claimed() {
            return self.with_permit(Act::Claim);
        }
        if !self.is_served() {
            return Wanting::now(Act::AddWorkload);
        }
        if self.phase().is_legacy() || self.phase() == Phase::Enrolled {
            return None;
        }
        self.with_permit(Act::Apply)
    }

    fn detach(&self) -> Option<Wanting> {
        if self.phase() == Phase::Out || self.sandbox.is_detached {
            None
        } else if self.phase() == Phase::Enrolling {
            Wanting::now(Act::Withdraw)
        } else {
            Wanting::now(Act::Detach)
        }
    }

    /// Peers stop sending to ztunnel before ztunnel stops listening, and captured connections may end.
    fn leave(&self) -> Option<Wanting> {
        match self.phase() {
            Phase::Enrolling => Wanting::now(Act::Withdraw),
            Phase::Enrolled | Phase::Adopted if !self.sandbox.is_located => {
                Wanting::now(Act::Locate)
            }
            Phase::Enrolled | Phase::Adopted => Wanting::now(Act::Announce),
            Phase::Announcing if self.world.is_announced => Wanting::now(Act::Leave),
            Phase::Announcing => Wanting::after_input(Act::Leave),
            Phase::Leaving { since } => Wanting::at(Act::Drain, since + self.world.propagation),
            Phase::Draining { since } => self.finish(since),
            Phase::Out | Phase::Legacy | Phase::ServedLegacy | Phase::Deleting { .. } => None,
        }
    }

    fn finish(&self, since: BootInstant) -> Option<Wanting> {
        let is_over = self.world.now >= since + self.world.grace;
        match self.sandbox.flows {
            _ if is_over => Wanting::now(Act::Withdraw),
            Some((_, 0)) => Wanting::now(Act::Withdraw),
            Some((at, _)) => Wanting::at(Act::CountFlows, at + COUNT_INTERVAL),
            None => Wanting::now(Act::CountFlows),
        }
    }

    /// The end of a pod missing from the source, without a DEL.
    fn towards_end(&self, since: BootInstant) -> Option<Wanting> {
        if self.world.now < since + GONE_GRACE {
            let act = if self.sandbox.is_located {
                Act::Look
            } else {
                Act::Locate
            };
            return Wanting::at(act, since + GONE_GRACE);
        }
        if !self.sandbox.is_located {
            return Wanting::now(Act::Locate);
        }
        let is_overdue = self.world.now >= since + GONE_TIMEOUT;
        match self.seen() {
            Some(NetnsState::Gone | NetnsState::Empty) => Wanting::now(Act::Forget),
            Some(_) if !self.phase().has_effects() => self.look_every(IDLE_LOOK_INTERVAL),
            // The intent comes before the effect: rules being removed are not repaired.
            Some(_)
                if is_overdue
                    && self.phase() == Phase::Enrolled
                    && self.sandbox.proxy == Proxy::Ztunnel =>
            {
                Wanting::now(Act::Announce)
            }
            Some(_)
                if is_overdue
                    && self.phase().has_rules()
                    && self.sandbox.proxy == Proxy::Ztunnel =>
            {
                Wanting::now(Act::Drain)
            }
            Some(_) if is_overdue && !self.phase().is_legacy() => Wanting::now(Act::Withdraw),
            Some(_) | None => self.look_since(since),
        }
    }

    fn update(&self) -> Option<Wanting> {
        let is_out_of_sync = matches!(
            self.world.wanted,
            Wanted::In {
                is_in_sync: false,
                ..
            }
        );
        let is_due = self.is_current
            && is_out_of_sync
            && self.phase() == Phase::Enrolled
            && self.sandbox.add.is_none()
            && self.is_claimed()
            && !self.is_handed_over();
        if is_due {
            Wanting::now(Act::Update)
        } else {
            None
        }
    }

    fn listeners(&self) -> Option<Wanting> {
        let is_due = self.is_current
            && self.phase() == Phase::Enrolled
            && self.sandbox.proxy == Proxy::Ztunnel
            && self.sandbox.add.is_none()
            && self.is_claimed()
            && !self.is_handed_over();
        if is_due && self.sandbox.is_deaf {
            return match self.pod.repairs_from {
                Some(at) => Wanting::at(Act::Readd, at),
                None => Wanting::now(Act::Readd),
            };
        }
        let at = self.world.listener_check.filter(|_| is_due)?;
        Wanting::at(Act::CheckListeners, at)
    }
}

/// Returns whether the broker has the sandbox or does not need the sandbox.
fn is_settled(phase: Phase) -> bool {
    matches!(
        phase,
        Phase::Out | Phase::ServedLegacy | Phase::Enrolled | Phase::Deleting { .. }
    )
}

fn needs_netconfig(act: Act) -> bool {
    match act {
        Act::Permit
        | Act::Begin
        | Act::Claim
        | Act::AddWorkload
        | Act::Apply
        | Act::Verify
        | Act::Update
        | Act::CheckListeners
        | Act::Readd
        | Act::Drain
        | Act::CountFlows
        | Act::Withdraw
        | Act::Detach
        | Act::Locate
        | Act::Look
        | Act::Forget => true,
        Act::Identify | Act::Announce | Act::Leave | Act::Reject | Act::GiveUp | Act::Answer => {
            false
        }
    }
}

/// The search for the netns of a running pod of the mesh without a sandbox.
fn search(pod: &Pod, world: &World) -> Option<Wish> {
    if !pod.sandboxes.is_empty()
        || !world.is_searched
        || world.leave == Some(UninstallMode::Handover)
    {
        return None;
    }
    let due = pod.unfound_since.unwrap_or(world.now) + DISCOVERY_DELAY;
    let at = Some(due).max(pod.search.map(|retry| retry.at));
    let wait = if world.netconfig.is_none() {
        Some(Wait::Netconfig)
    } else {
        at.filter(|at| *at > world.now).map(Wait::Until)
    };
    Some(Wish {
        step: Step::Find,
        wait,
    })
}
