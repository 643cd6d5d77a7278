//! The normal form of a node, by which equal states are recognized.

use std::time::Duration;

use super::{NOW, Node};
use crate::{boottime::BootInstant, pods::state::Phase};

/// Older times count as equally long ago.
const OLDEST: u64 = NOW - 700;

fn time(seconds: u64) -> BootInstant {
    BootInstant::after_boot(Duration::from_secs(seconds))
}

impl Node {
    /// Shifts times and revisions, so that states which differ only by them are equal.
    pub(in super::super) fn normalize(&mut self) {
        self.normalize_times();
        self.normalize_revisions();
        self.normalize_reports();
    }

    fn normalize_times(&mut self) {
        let shift = self.now.since(time(NOW));
        let earlier = |at: &mut BootInstant| {
            let shifted = at.since_boot().saturating_sub(shift);
            *at = BootInstant::after_boot(shifted.max(Duration::from_secs(OLDEST)));
        };
        let pod = &mut self.pod;
        pod.repairs_from.take_if(|at| *at <= self.now);
        let times = [
            Some(&mut self.now),
            self.gone_since.as_mut(),
            pod.repairs_from.as_mut(),
            pod.unfound_since.as_mut(),
            pod.search.as_mut().map(|search| &mut search.at),
        ];
        times.into_iter().flatten().for_each(earlier);
        let planned = self.flight.iter_mut().map(|it| &mut it.plan.phase);
        let phases = pod.sandboxes.iter_mut().map(|it| &mut it.phase);
        for phase in phases.chain(planned) {
            if let Phase::Leaving { since }
            | Phase::Draining { since }
            | Phase::Deleting { since } = phase
            {
                earlier(since);
            }
        }
        if let Some(search) = &mut pod.search {
            search.attempts = search.attempts.min(7);
        }
        for sandbox in &mut pod.sandboxes {
            let looks = sandbox.look.iter_mut().map(|(at, _)| at);
            for at in looks.chain(sandbox.flows.iter_mut().map(|(at, _)| at)) {
                earlier(at);
                if *at < time(NOW) {
                    *at = time(OLDEST);
                }
            }
            for retry in sandbox.retries.values_mut() {
                // Later delays are equal.
                retry.attempts = retry.attempts.min(7);
            }
            let adds = sandbox.add.iter_mut();
            let deadlines = adds.flat_map(|add| [&mut add.deadline, &mut add.work_deadline]);
            let retries = sandbox.retries.values_mut().map(|retry| &mut retry.at);
            deadlines.chain(retries).for_each(earlier);
        }
    }

    /// Replaces each revision by its rank.
    fn normalize_revisions(&mut self) {
        let sandboxes = self.pod.sandboxes.iter_mut().map(|it| &mut it.revision);
        let netns = self.netns.iter_mut().map(|it| &mut it.removed_at);
        let flight = self.flight.iter_mut().map(|it| &mut it.plan.revision);
        let mut revisions: Vec<&mut u64> = sandboxes.chain(netns).chain(flight).collect();
        let mut ranks: Vec<u64> = revisions.iter().map(|it| **it).collect();
        ranks.push(0);
        ranks.sort_unstable();
        ranks.dedup();
        for revision in &mut revisions {
            let rank = ranks.binary_search(revision).unwrap();
            **revision = rank.try_into().unwrap();
        }
        self.next_revision = ranks.len().try_into().unwrap();
    }

    /// Reduces the count of reports to whether a report arrived during the step in flight.
    fn normalize_reports(&mut self) {
        for sandbox in &mut self.pod.sandboxes {
            let flights = self.flight.iter_mut();
            let mut plans = flights
                .map(|it| &mut it.plan)
                .filter(|it| it.number == sandbox.number);
            let planned = plans.next().map(|plan| std::mem::take(&mut plan.reports));
            let is_reported = planned.is_some_and(|reports| reports != sandbox.reports);
            sandbox.reports = is_reported.into();
        }
    }
}
