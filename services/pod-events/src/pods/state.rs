//! A pod's state, as far as the next step depends on the state: the progress of each sandbox, and the observations of
//! this process.
//!
//! State changes in two ways only: an input (`expect`, `delete`, ..) records an event, and `learn` records the outcome of
//! a step. Neither decides anything.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use crate::{boottime::BootInstant, tasks::NetnsState};

/// A run of a service: its instance_id.
pub(crate) type Run = Arc<str>;

/// The progress of a sandbox, checkpointed before the announced effects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Phase {
    /// Nothing is in place.
    Out,
    /// Parts of an enrollment may be in place.
    Enrolling,
    /// Another agent enrolled the sandbox, as far as known.
    Adopted,
    /// Another agent's rules in iptables' legacy tables lead to ztunnel; ztunnel does not have the sandbox from inpod.
    Legacy,
    ServedLegacy,
    Enrolled,
    /// The pod's annotation is being withdrawn. Everything is in place.
    Announcing,
    /// The annotation is withdrawn, and peers are learning so. Everything is in place.
    Leaving {
        since: BootInstant,
    },
    /// New connections bypass the mesh; captured connections continue.
    Draining {
        since: BootInstant,
    },
    /// The sandbox has ended or is ending.
    Deleting {
        since: BootInstant,
    },
}

impl Phase {
    /// Returns whether something may be in place at a service or in the netns.
    pub(crate) fn has_effects(self) -> bool {
        self != Self::Out
    }

    /// Returns whether the pod may have connections through the mesh, to be kept despite failures.
    pub(crate) fn is_in_mesh(self) -> bool {
        !matches!(self, Self::Out | Self::Enrolling | Self::Deleting { .. })
    }

    pub(crate) fn is_legacy(self) -> bool {
        matches!(self, Self::Legacy | Self::ServedLegacy)
    }

    pub(crate) fn is_deleting(self) -> bool {
        matches!(self, Self::Deleting { .. })
    }

    /// Returns whether a handover may leave the sandbox unchanged.
    pub(crate) fn is_stable(self) -> bool {
        self.is_legacy() || matches!(self, Self::Out | Self::Enrolled | Self::Adopted)
    }

    /// Returns whether inpod's rules are in place for all connections.
    pub(crate) fn has_rules(self) -> bool {
        matches!(
            self,
            Self::Enrolled | Self::Announcing | Self::Leaving { .. }
        )
    }
}

/// The proxy to which a sandbox is or will be redirected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Proxy {
    Ztunnel,
    Sidecar,
}

/// The ADD of a sandbox, until it is answered.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Add {
    /// The end of the time for starting steps forward; the rest of the caller's time is for undoing steps.
    pub(crate) work_deadline: BootInstant,
    pub(crate) deadline: BootInstant,
    /// `None` until the pod is identified and decided on.
    pub(crate) goal: Option<Goal>,
    /// Set while the ADD holds a concurrency slot.
    pub(crate) has_permit: bool,
    /// Set by an error, a DEL, or the caller's departure.
    pub(crate) is_failed: bool,
    /// Set if the sandbox was recorded before: a failure does not forget such a sandbox.
    pub(crate) is_repeated: bool,
    /// Set by a DEL: the sandbox is forgotten with the answer.
    pub(crate) is_deleted: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Goal {
    Join(Proxy),
    /// The sandbox is recorded, and nothing else is done for the ADD.
    Record,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Retry {
    pub(crate) attempts: u32,
    pub(crate) at: BootInstant,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Sandbox {
    /// The sandbox's number, unique in this process.
    pub(crate) number: u64,
    pub(crate) phase: Phase,
    pub(crate) proxy: Proxy,
    /// Cleared while the first ADD of the sandbox is not decided on: nothing is checkpointed then.
    pub(crate) is_recorded: bool,
    /// Orders the additions and removals of the workload at the broker.
    pub(crate) revision: u64,
    /// Cleared while the netns of a sandbox enrolled by another agent is not found.
    pub(crate) is_located: bool,
    /// Set if a redirection to a sidecar stays in place unmanaged, as after an uninstall.
    pub(crate) is_detached: bool,
    /// Set while the identity is a placeholder, because the pod was admitted before the source showed the pod.
    pub(crate) is_placeholder: bool,
    /// The run of netconfig with the claim.
    pub(crate) claimed_by: Option<Run>,
    /// The run of the broker through whom a ztunnel acknowledged the revision.
    pub(crate) served_by: Option<Run>,
    /// Set if the rules may differ from the applied rules.
    pub(crate) is_suspect: bool,
    /// The number of reports of differing rules and of releases. A changed number reveals a report during a step.
    pub(crate) reports: u32,
    /// Set while ztunnel was seen not to listen in the netns.
    pub(crate) is_deaf: bool,
    /// The last look at the processes in the netns.
    pub(crate) look: Option<(BootInstant, NetnsState)>,
    /// The last count of captured connections.
    pub(crate) flows: Option<(BootInstant, u32)>,
    pub(crate) retries: BTreeMap<Act, Retry>,
    pub(crate) add: Option<Add>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Pod {
    /// The sandboxes in the order of arrival. The last recorded sandbox is current.
    pub(crate) sandboxes: Vec<Sandbox>,
    /// The end of the delay of repairs, if another agent keeps undoing repairs.
    pub(crate) repairs_from: Option<BootInstant>,
    /// The time when a running pod of the mesh was first seen without a sandbox.
    pub(crate) unfound_since: Option<BootInstant>,
    pub(crate) search: Option<Retry>,
}

/// A step of a sandbox: one or two calls, or one write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Act {
    /// Wait for a concurrency slot.
    Permit,
    /// Replace a placeholder identity by the pod of the source.
    Identify,
    /// Record that an enrollment begins.
    Begin,
    Claim,
    /// Hand the netns to ztunnel, at a new revision.
    AddWorkload,
    Apply,
    /// Compare the rules with the applied rules and repair them.
    Verify,
    /// Apply changed settings or addresses.
    Update,
    /// Look whether ztunnel listens in the netns.
    CheckListeners,
    /// Remove and add the workload, because ztunnel does not listen.
    Readd,
    /// Record that the pod leaves. The annotation is withdrawn as a consequence.
    Announce,
    /// Record that the annotation is withdrawn.
    Leave,
    Drain,
    CountFlows,
    /// Remove rules, workload and claim.
    Withdraw,
    /// Release the claim; the redirection to the sidecar stays.
    Detach,
    /// Search for the netns of a sandbox enrolled by another agent.
    Locate,
    /// Look at the processes in the netns.
    Look,
    /// Remove workload, claim and record of an ended sandbox.
    Forget,
    /// Continue with a sandbox whose DEL was wrong.
    Reject,
    /// Record a failed ADD with effects as ending.
    GiveUp,
    Answer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Step {
    /// Wait for an input, at most until the given time.
    Rest(Option<BootInstant>),
    /// Search for the netns of a pod without a sandbox.
    Find,
    Take(u64, Act),
}

/// A step with the state at the time of planning.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Plan {
    pub(crate) number: u64,
    pub(crate) act: Act,
    pub(crate) phase: Phase,
    pub(crate) revision: u64,
    pub(crate) reports: u32,
    pub(crate) proxy: Proxy,
    /// The source does not want the sandbox outside the mesh.
    pub(crate) stays: bool,
    pub(crate) netconfig: Option<Run>,
    pub(crate) broker: Option<Run>,
}

/// The cause of a failed step, as far as the next step depends on the cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Problem {
    /// The netns is no longer at its path.
    Gone,
    /// netconfig does not know the claim.
    ClaimUnknown,
    /// A restarted service or a later revision is in the way; the next attempt succeeds.
    Transient,
    Other,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fact {
    Done,
    Looked(NetnsState),
    Counted(u32),
    Deaf,
    /// A search found a netns. The number is for its sandbox.
    Found {
        number: u64,
        is_adopted: bool,
        proxy: Proxy,
    },
    /// A search found that no process of an ended pod is left.
    Ended,
}

const TRANSIENT_RETRY: Duration = Duration::from_millis(20);
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(30);

impl Retry {
    fn after(before: Option<Self>, now: BootInstant, problem: Problem) -> Self {
        let attempts = before.map_or(0, |before| before.attempts);
        let shortest = if problem == Problem::Transient {
            TRANSIENT_RETRY
        } else {
            RETRY_INTERVAL
        };
        let wait = shortest.saturating_mul(1 << attempts.min(10));
        Self {
            attempts: attempts + 1,
            at: now + wait.min(MAX_RETRY_INTERVAL),
        }
    }
}

impl Sandbox {
    pub(crate) fn new(number: u64) -> Self {
        Self {
            number,
            phase: Phase::Out,
            proxy: Proxy::Ztunnel,
            is_recorded: true,
            revision: 0,
            is_located: true,
            is_detached: false,
            is_placeholder: false,
            claimed_by: None,
            served_by: None,
            is_suspect: false,
            reports: 0,
            is_deaf: false,
            look: None,
            flows: None,
            retries: BTreeMap::new(),
            add: None,
        }
    }

    fn fail_add(&mut self) {
        if let Some(add) = &mut self.add {
            add.is_failed = true;
        }
    }

    /// Records an ADD of a known sandbox. Everything in place is confirmed before the answer.
    pub(crate) fn repeat_add(&mut self, add: &Add) {
        if self.phase.is_deleting() {
            self.phase = Phase::Enrolling;
        }
        (self.claimed_by, self.served_by) = (None, None);
        self.is_suspect |= self.phase.has_rules();
        self.retries.clear();
        self.add = Some(Add {
            is_repeated: self.is_recorded,
            ..add.clone()
        });
    }

    /// Records a report of differing rules.
    pub(crate) fn suspect(&mut self) {
        self.is_suspect = true;
        self.reports = self.reports.wrapping_add(1);
    }

    /// Records a report that netconfig has released the netns.
    pub(crate) fn lose_claim(&mut self) {
        self.claimed_by = None;
        self.reports = self.reports.wrapping_add(1);
    }

    /// Records that the sandbox ended unnoticed.
    fn mark_ended(&mut self) {
        self.phase = Phase::Deleting {
            since: BootInstant::BOOT,
        };
        self.look = None;
    }
}

impl Pod {
    pub(crate) fn sandbox_mut(&mut self, number: u64) -> Option<&mut Sandbox> {
        self.sandboxes.iter_mut().find(|it| it.number == number)
    }

    /// Returns the index of the current sandbox.
    pub(crate) fn current(&self) -> Option<usize> {
        self.sandboxes.iter().rposition(|it| it.is_recorded)
    }

    /// Ends the delays of all steps, because something outside has changed.
    pub(crate) fn wake(&mut self) {
        for sandbox in &mut self.sandboxes {
            sandbox.retries.clear();
        }
        self.search = None;
    }

    /// Returns the pod of a new process: only phases, revisions and identities are checkpointed.
    pub(crate) fn reload(&self) -> Self {
        let recorded = self.sandboxes.iter().filter(|it| it.is_recorded);
        let reloaded = recorded.map(|it| Sandbox {
            claimed_by: None,
            served_by: None,
            is_suspect: it.phase.has_rules(),
            is_deaf: false,
            look: None,
            flows: None,
            retries: BTreeMap::new(),
            add: None,
            ..it.clone()
        });
        Self {
            sandboxes: reloaded.collect(),
            ..Self::default()
        }
    }

    /// Records an ADD of a sandbox.
    pub(crate) fn expect(&mut self, number: u64, add: Add) {
        match self.sandbox_mut(number) {
            Some(sandbox) => sandbox.repeat_add(&add),
            None => self.sandboxes.push(Sandbox {
                add: Some(add),
                is_recorded: false,
                ..Sandbox::new(number)
            }),
        }
    }

    /// Records the decision on an ADD.
    pub(crate) fn decide(&mut self, number: u64, goal: Goal) {
        if let Some(sandbox) = self.sandbox_mut(number)
            && let Some(add) = &mut sandbox.add
        {
            add.goal = Some(goal);
            sandbox.is_recorded = true;
        }
    }

    /// Records a DEL. The first DEL counts: repeated DELs would keep a running pod from being managed again. The
    /// unfinished enrollment of a waiting ADD is undone instead, and the record goes with the answer.
    pub(crate) fn delete(&mut self, number: u64, now: BootInstant) {
        let Some(sandbox) = self.sandbox_mut(number) else {
            return;
        };
        let is_undone = sandbox.add.is_some() && !sandbox.phase.is_in_mesh();
        if let Some(add) = &mut sandbox.add {
            (add.is_failed, add.is_deleted) = (true, true);
        }
        if is_undone || sandbox.phase.is_deleting() {
            return;
        }
        if sandbox.phase == Phase::Out {
            self.sandboxes.retain(|it| it.number != number);
        } else {
            (sandbox.phase, sandbox.look) = (Phase::Deleting { since: now }, None);
        }
    }

    /// Records since when a running pod of the mesh has no sandbox.
    pub(crate) fn note_missing(&mut self, is_searched: bool, now: BootInstant) {
        let is_missing = is_searched && self.sandboxes.is_empty();
        self.unfound_since = is_missing.then(|| self.unfound_since.unwrap_or(now));
    }

    /// Records the start of a sandbox's step. A workload is added at a new revision, because the last removal may have had
    /// a later revision than the record.
    pub(crate) fn start(&mut self, plan: &mut Plan, revision: u64) {
        let Some(sandbox) = self.sandbox_mut(plan.number) else {
            return;
        };
        if matches!(plan.act, Act::Begin | Act::AddWorkload | Act::Readd) {
            (sandbox.revision, plan.revision) = (revision, revision);
        }

        if plan.act == Act::Claim {
            // Without an answer, netconfig may hold the claim.
            sandbox.is_detached = false;
        }
        if plan.act == Act::AddWorkload
            && let Some(add) = &mut sandbox.add
        {
            // Waiting for ztunnel is no work of this node.
            add.has_permit = false;
        }
    }

    /// Records the outcome of a step, even if the step was cancelled. A fact changes the knowledge of a service in any
    /// case, and the phase only if the phase is the same as at the time of planning.
    pub(crate) fn learn(
        &mut self,
        plan: &Plan,
        outcome: Result<Fact, Problem>,
        now: BootInstant,
        broker: Option<&Run>,
    ) {
        let Some(index) = self
            .sandboxes
            .iter()
            .position(|it| it.number == plan.number)
        else {
            return;
        };
        let sandbox = &mut self.sandboxes[index];
        // A removal may have succeeded even if the answer is missing.
        if matches!(plan.act, Act::Withdraw | Act::Detach | Act::Forget) {
            (sandbox.claimed_by, sandbox.served_by) = (None, None);
        }
        let is_unchanged = (sandbox.phase, sandbox.revision) == (plan.phase, plan.revision);
        match outcome {
            Ok(fact) => {
                sandbox.retries.remove(&plan.act);
                sandbox.learn_fact(plan, fact, now, is_unchanged);
                // A broker restarted during a removal may have received the sandbox again.
                let is_removed = sandbox.proxy == Proxy::Sidecar || plan.broker.as_ref() == broker;
                match fact {
                    Fact::Ended => return self.forget(index),
                    Fact::Found {
                        number,
                        is_adopted,
                        proxy,
                    } => {
                        return self.found(index + 1, number, is_adopted, proxy);
                    }
                    Fact::Done | Fact::Looked(_) | Fact::Counted(_) | Fact::Deaf => {}
                }
                let is_forgotten = plan.act == Act::Forget && is_removed;
                if is_unchanged && plan.act == Act::Withdraw && is_removed {
                    sandbox.phase = Phase::Out;
                } else if is_unchanged && is_forgotten {
                    self.forget(index);
                } else if plan.act == Act::Answer {
                    self.finish_add(index, now);
                } else if is_unchanged {
                    sandbox.advance(plan, now);
                }
            }
            Err(problem) => sandbox.learn_problem(plan, problem, is_unchanged, now),
        }
    }

    /// Records a found sandbox. Rules of another agent, or of a sidecar, may be in place.
    pub(crate) fn found(&mut self, at: usize, number: u64, is_adopted: bool, proxy: Proxy) {
        let phase = if is_adopted || proxy == Proxy::Sidecar {
            Phase::Adopted
        } else {
            Phase::Enrolling
        };
        let found = Sandbox {
            phase,
            proxy,
            ..Sandbox::new(number)
        };
        self.sandboxes.insert(at, found);
        (self.unfound_since, self.search) = (None, None);
    }

    /// Records that a search found nothing.
    pub(crate) fn miss(&mut self, now: BootInstant) {
        self.search = Some(Retry::after(self.search, now, Problem::Other));
    }

    fn forget(&mut self, index: usize) {
        let sandbox = &mut self.sandboxes[index];
        if sandbox.add.is_some() {
            // The failed ADD is answered next.
            (sandbox.phase, sandbox.look) = (Phase::Out, None);
            sandbox.fail_add();
        } else {
            self.sandboxes.remove(index);
        }
    }

    /// Ends an answered ADD. A failed enrollment leaves no record, unless something is left to remove.
    fn finish_add(&mut self, index: usize, now: BootInstant) {
        let sandbox = &mut self.sandboxes[index];
        let Some(add) = sandbox.add.take() else {
            return;
        };
        let was_begun = !sandbox.is_recorded || matches!(add.goal, Some(Goal::Join(_)));
        let is_forgotten = add.is_deleted || (was_begun && !add.is_repeated);
        if add.is_failed && is_forgotten && sandbox.phase == Phase::Out {
            self.sandboxes.remove(index);
        } else if add.is_deleted && sandbox.phase.is_in_mesh() {
            // The enrollment ended before the DEL took effect.
            (sandbox.phase, sandbox.look) = (Phase::Deleting { since: now }, None);
        }
    }
}

impl Sandbox {
    fn learn_fact(&mut self, plan: &Plan, fact: Fact, now: BootInstant, is_unchanged: bool) {
        match (plan.act, fact) {
            (Act::Permit, _) => {
                if let Some(add) = &mut self.add {
                    add.has_permit = true;
                }
            }
            (Act::Identify, _) => self.is_placeholder = false,
            (Act::Claim, _) => {
                // A reported release may be the release of this claim.
                let is_held = self.reports == plan.reports;
                self.claimed_by = plan.netconfig.clone().filter(|_| is_held);
                // Without the claim, netconfig did not watch the rules.
                self.is_suspect |= self.phase.has_rules();
            }
            (Act::AddWorkload, _) if is_unchanged => {
                self.served_by.clone_from(&plan.broker);
                self.is_deaf = false;
            }
            (Act::Readd, _) => self.is_deaf = false,
            (Act::CheckListeners, fact) => self.is_deaf = fact == Fact::Deaf,

            (Act::Verify | Act::Apply, _) => self.is_suspect &= self.reports != plan.reports,
            (Act::Look, Fact::Looked(state)) => self.look = Some((now, state)),
            (Act::CountFlows, Fact::Counted(flows)) => self.flows = Some((now, flows)),
            _ => {}
        }
    }

    /// Advances the phase after a successful step.
    fn advance(&mut self, plan: &Plan, now: BootInstant) {
        self.phase = match (plan.act, self.phase) {
            (Act::Begin, _) => {
                self.proxy = plan.proxy;
                Phase::Enrolling
            }
            (Act::AddWorkload, Phase::Legacy) => Phase::ServedLegacy,
            (Act::Apply, _) => Phase::Enrolled,
            (Act::Announce, _) => Phase::Announcing,
            (Act::Leave, _) => Phase::Leaving { since: now },
            (Act::Drain, _) => Phase::Draining { since: now },
            (Act::Detach, Phase::Enrolled) => {
                self.is_detached = true;
                Phase::Enrolled
            }
            (Act::Detach, _) => Phase::Out,
            (Act::GiveUp, _) => Phase::Deleting { since: now },
            // The next steps verify the enrollment, or undo it.
            (Act::Reject, _) if plan.stays => Phase::Adopted,
            (Act::Reject, _) => Phase::Enrolling,
            (_, phase) => phase,
        };
    }

    fn learn_problem(
        &mut self,
        plan: &Plan,
        problem: Problem,
        is_unchanged: bool,
        now: BootInstant,
    ) {
        if matches!(problem, Problem::ClaimUnknown | Problem::Gone) {
            self.claimed_by = None;
        }

        let is_waiting = self.add.as_ref().is_some_and(|add| !add.is_failed);
        match (plan.act, problem) {
            (Act::Claim, Problem::Gone) if !is_waiting && is_unchanged => return self.mark_ended(),
            (_, Problem::Other | Problem::Gone) if is_waiting && plan.act.is_forward() => {
                return self.fail_add();
            }
            _ => {}
        }
        let before = self.retries.get(&plan.act).copied();
        self.retries
            .insert(plan.act, Retry::after(before, now, problem));
    }
}

impl Act {
    /// Returns whether a failure of the step fails a waiting ADD.
    pub(crate) fn is_forward(self) -> bool {
        matches!(
            self,
            Self::Permit
                | Self::Begin
                | Self::Claim
                | Self::AddWorkload
                | Self::Apply
                | Self::Verify
        )
    }
}
