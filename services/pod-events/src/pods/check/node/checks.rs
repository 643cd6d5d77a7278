//! The properties that are checked after every move, at every answer and once nothing happens any more.

use super::{Leave, Netns, Node, Rules, Shown};
use crate::pods::{
    next::{Ending, Wanted},
    state::{Add, Goal, Phase, Proxy, Sandbox},
};

impl Netns {
    /// Returns whether no rules, claim or workload are in place.
    fn is_clean(&self) -> bool {
        self.rules == Rules::None && self.claim.is_none() && !self.has_workload
    }
}

impl Node {
    /// Checks that every redirected sandbox has a listening proxy.
    pub(super) fn check_moment(&mut self) {
        let deaf = self.netns.iter().find(|it| {
            let is_redirected = it.rules != Rules::None && it.is_running;
            let is_deaf = is_redirected && !it.has_listeners && !it.is_broken;
            let sandbox = self.sandbox(it.number);
            let is_deleting = sandbox.is_some_and(|it| it.phase.is_deleting());
            is_deaf && !it.was_deleted && !is_deleting && !self.is_given_up(it)
        });
        if let Some(number) = deaf.map(|it| it.number)
            && self.proxy == Proxy::Ztunnel
        {
            self.violate(format!(
                "sandbox {number} is redirected to ztunnel, which does not listen in its netns"
            ));
        }
    }

    /// Returns whether the runtime has started another sandbox before it learned of success.
    fn is_given_up(&self, netns: &Netns) -> bool {
        !netns.is_admitted && self.netns.last() != Some(netns)
    }

    /// Checks that an answer agrees with what is in place.
    pub(super) fn check_answer(&mut self, number: u64, add: &Add, is_failed: bool) {
        let (Some(sandbox), Some(netns)) = (self.sandbox(number), self.netns_of(number)) else {
            return;
        };
        // The core may not know yet that netconfig was restarted.
        let is_claimed = netns.claim.is_some() || self.netconfig > 0;
        let is_served = sandbox.proxy == Proxy::Sidecar || netns.has_listeners;
        let is_complete = netns.rules == Rules::Complete && is_served && is_claimed;
        let is_untracked = matches!(sandbox.phase, Phase::Out | Phase::Enrolling);
        let is_left = is_failed && is_untracked && !netns.is_clean();
        let is_joined = !is_failed && matches!(add.goal, Some(Goal::Join(_)));
        if is_joined && !is_complete && !netns.is_broken && netns.is_running {
            self.violate(format!(
                "sandbox {number}'s ADD succeeds without claim, listeners or rules"
            ));
        } else if is_left && !netns.was_deleted && !add.is_repeated && !self.is_given_up(netns) {
            self.violate(format!(
                "sandbox {number}'s ADD fails and leaves a claim, workload or rules in place"
            ));
        }
    }

    /// Checks that everything is as desired once nothing happens any more.
    pub(super) fn check_end(&self) -> Result<(), String> {
        let owed = self.netns.iter().filter(|it| it.awaits_answer);
        let mut unanswered = self
            .adds()
            .map(|(number, _)| number)
            .chain(owed.map(|it| it.number));
        if let Some(number) = unanswered.next() {
            return Err(format!("sandbox {number}'s ADD is never answered"));
        }
        for netns in &self.netns {
            let defect = match self.sandbox(netns.number) {
                Some(sandbox) => self.find_defect(netns, sandbox),
                None => self.find_defect_of_unknown(netns),
            };
            if let Some(defect) = defect {
                return Err(format!("sandbox {} {defect}", netns.number));
            }
        }
        Ok(())
    }

    /// Returns the defect of a sandbox unknown to the core.
    fn find_defect_of_unknown(&self, netns: &Netns) -> Option<&'static str> {
        let is_newest = self.netns.last() == Some(netns);
        let is_wanted = self.is_wanted() && self.shown == Shown::Running && self.leave.is_none();
        let may_keep_rules = netns.was_deleted
            || !netns.is_running
            || netns.is_broken
            || self.is_given_up(netns)
            || self.proxy == Proxy::Sidecar;
        let is_left = netns.rules != Rules::None && !may_keep_rules;
        if netns.claim.is_some() || netns.has_workload || is_left {
            Some("is forgotten while its claim, workload or rules are in place")
        } else if netns.is_running
            && is_wanted
            && is_newest
            && netns.is_admitted
            && !netns.was_deleted
        {
            Some("is running and wanted in the mesh, but the core does not know it")
        } else {
            None
        }
    }

    /// Returns the defect of a sandbox known to the core.
    fn find_defect(&self, netns: &Netns, sandbox: &Sandbox) -> Option<&'static str> {
        let phase = sandbox.phase;
        let is_current = self.current() == Some(sandbox);
        if self.leave == Some(Leave::Handover) && phase.is_stable() {
            return None;
        }
        if netns.was_deleted && (!netns.is_running || self.ending() == Ending::Agreed) {
            return Some("is deleted, but the core still knows it");
        }
        if !is_current {
            return None;
        }
        if !netns.is_running {
            let is_unknown = self.wanted() == Wanted::Unknown && !phase.has_effects();
            let is_out = phase == Phase::Out && self.shown != Shown::Missing;
            let may_stay = is_unknown || is_out || sandbox.is_detached;
            return (!may_stay).then_some("has ended, but the core still knows it");
        }
        let is_served =
            sandbox.proxy == Proxy::Sidecar || (netns.has_listeners && netns.has_workload);
        let is_in_mesh = phase == Phase::Enrolled
            && netns.rules == Rules::Complete
            && netns.claim == self.netconfig_run()
            && is_served
            && !sandbox.is_deaf;
        let is_out = phase == Phase::Out && netns.is_clean();
        let is_held = phase == Phase::ServedLegacy && netns.claim == self.netconfig_run();
        match self.wanted() {
            Wanted::Gone { .. } | Wanted::Unknown => None,
            _ if phase.is_legacy() => {
                // Their listeners are not checked.
                let is_ok = is_held && (is_served || netns.is_broken);
                (!is_ok).then_some("has foreign rules and no workload")
            }
            Wanted::In { is_in_sync, .. } => {
                (!is_in_mesh || !is_in_sync).then_some("is not in the mesh, but wanted there")
            }
            Wanted::Out => (!is_out).then_some("has not left the mesh"),
            Wanted::Detached => netns
                .claim
                .is_some()
                .then_some("is to be unmanaged, but its claim is held"),
        }
    }
}
