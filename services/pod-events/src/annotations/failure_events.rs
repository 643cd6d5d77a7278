//! Selects the failures of a pod that are worth an Event: new or changed failures, and the end of a failure.

use std::collections::HashMap;

use inpod_types::{PodUid, Reason};

use super::desired::PodStatus;
use crate::{checkpoint::Intent, pod::PodKey, status::EventKind};

#[derive(Debug, Default)]
pub(super) struct FailureEvents(HashMap<PodKey, Reported>);

#[derive(Debug)]
struct Reported {
    uid: PodUid,
    reason: Reason,
    /// Cleared when the failure disappears, so that a returning failure is reported again.
    is_current: bool,
}

impl FailureEvents {
    pub(super) fn event_for(
        &mut self,
        key: &PodKey,
        status: &PodStatus<'_>,
    ) -> Option<(EventKind, Reason, String)> {
        let uid = &status.pod.pod.uid;
        let reported = self.0.get_mut(key).filter(|reported| reported.uid == *uid);
        let Some(failure) = status.failure else {
            let reported = reported?;
            reported.is_current = false;
            let is_enrolled = |intent: &Intent| matches!(intent, Intent::Enrolled { .. });
            status.record.filter(|record| is_enrolled(&record.intent))?;
            let message = format!("Joined the mesh after {}", reported.reason.name());
            self.0.remove(key);
            return Some((EventKind::Normal, status.why, message));
        };
        if reported.is_some_and(|reported| reported.is_current && reported.reason == failure.reason)
        {
            return None;
        }
        let event = Reported {
            uid: uid.clone(),
            reason: failure.reason,
            is_current: true,
        };
        self.0.insert(key.clone(), event);
        Some((EventKind::Warning, failure.reason, failure.message.clone()))
    }

    pub(super) fn remove(&mut self, key: &PodKey) {
        self.0.remove(key);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use inpod_types::{Enrollment, Failure};

    use super::*;
    use crate::{checkpoint::Record, decide::Decision, task::View, testing};

    fn observe(
        events: &mut FailureEvents,
        intent: Option<Intent>,
        failure: Option<Reason>,
    ) -> Option<(EventKind, Reason)> {
        let (pod, mut view) = (testing::pod("shop", "web"), View::default());
        let record = |intent| {
            Arc::new(Record {
                intent,
                ..testing::record("c1")
            })
        };
        view.records.extend(intent.map(record));
        view.failure = failure.map(|reason| Failure::new(reason, "no"));
        let decision = Decision {
            enrollment: Enrollment::Ambient,
            reason: Reason::LabelOnPod,
        };
        let status = PodStatus::of(&pod, Some(&view), &decision, true);
        let key = ("shop".parse().unwrap(), "web".parse().unwrap());
        events
            .event_for(&key, &status)
            .map(|(kind, reason, _)| (kind, reason))
    }

    fn enrolled() -> Option<Intent> {
        Some(Intent::Enrolled {
            fingerprint: "f".into(),
        })
    }

    #[test]
    fn a_failure_is_reported_when_it_appears_when_it_changes_and_when_it_is_resolved() {
        let mut events = FailureEvents::default();
        let refused = Some(Reason::ZtunnelRefused);
        let out = || Some(Intent::Out);
        assert_eq!(observe(&mut events, out(), None), None);
        let event = observe(&mut events, out(), refused);
        assert_eq!(event, Some((EventKind::Warning, Reason::ZtunnelRefused)));
        assert_eq!(observe(&mut events, Some(Intent::Enrolling), refused), None);
        let event = observe(&mut events, out(), Some(Reason::DependencyUnavailable));
        assert_eq!(
            event,
            Some((EventKind::Warning, Reason::DependencyUnavailable))
        );
        let event = observe(&mut events, enrolled(), None);
        assert_eq!(event, Some((EventKind::Normal, Reason::LabelOnPod)));
        assert_eq!(observe(&mut events, enrolled(), None), None);
    }

    #[test]
    fn a_refused_add_that_is_repeated_is_reported_again() {
        let mut events = FailureEvents::default();
        let refused = Some(Reason::ZtunnelRefused);
        assert!(observe(&mut events, None, refused).is_some());
        assert_eq!(observe(&mut events, None, None), None);
        assert!(observe(&mut events, None, refused).is_some());
        let event = observe(&mut events, enrolled(), None);
        assert_eq!(event, Some((EventKind::Normal, Reason::LabelOnPod)));
    }

    #[test]
    fn what_passes_is_neither_a_failure_nor_its_end() {
        let mut events = FailureEvents::default();
        let out = || Some(Intent::Out);
        assert!(observe(&mut events, out(), Some(Reason::ZtunnelRefused)).is_some());
        assert_eq!(observe(&mut events, out(), Some(Reason::Starting)), None);
        assert_eq!(
            observe(
                &mut FailureEvents::default(),
                out(),
                Some(Reason::NotSeeded)
            ),
            None
        );
    }
}
