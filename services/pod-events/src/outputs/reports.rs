//! What is worth an Event of a pod's failures: one that appears or becomes another, and its end.

use std::collections::HashMap;

use inpod_types::{PodUid, Reason};

use super::{Kind, wish::Standing};
use crate::{checkpoint::Intent, source::PodKey};

/// What was told of failures that are not mended.
#[derive(Debug, Default)]
pub(super) struct Reports(HashMap<PodKey, Told>);

#[derive(Debug)]
struct Told {
    uid: PodUid,
    reason: Reason,
    /// Whether it still stands: one that comes again is told again.
    stands: bool,
}

impl Reports {
    /// What is to be told of a pod now.
    pub(super) fn look(
        &mut self,
        key: &PodKey,
        standing: &Standing<'_>,
    ) -> Option<(Kind, Reason, String)> {
        let uid = &standing.pod.pod.uid;
        let known = self.0.get_mut(key).filter(|known| known.uid == *uid);
        let Some(failure) = standing.failure else {
            let known = known?;
            known.stands = false;
            let is_enrolled = |intent: &Intent| matches!(intent, Intent::Enrolled { .. });
            standing
                .record
                .filter(|record| is_enrolled(&record.intent))?;
            let message = format!("In the mesh, after {}", known.reason.name());
            self.0.remove(key);
            return Some((Kind::Normal, standing.why, message));
        };
        if known.is_some_and(|known| known.stands && known.reason == failure.reason) {
            return None;
        }
        let told = Told {
            uid: uid.clone(),
            reason: failure.reason,
            stands: true,
        };
        self.0.insert(key.clone(), told);
        Some((Kind::Warning, failure.reason, failure.message.clone()))
    }

    /// The source shows no such pod.
    pub(super) fn forget(&mut self, key: &PodKey) {
        self.0.remove(key);
    }
}

#[cfg(test)]
mod tests {
    use inpod_types::{Enrollment, Failure};

    use super::*;
    use crate::{checkpoint::Record, decide::Decision, task::View, testing};

    fn look(
        reports: &mut Reports,
        intent: Option<Intent>,
        failure: Option<Reason>,
    ) -> Option<(Kind, Reason)> {
        let (pod, mut view) = (testing::pod("shop", "web"), View::default());
        let record = |intent| Record {
            intent,
            ..testing::record("c1")
        };
        view.records.extend(intent.map(record));
        view.failure = failure.map(|reason| Failure::new(reason, "no"));
        let decision = Decision {
            enrollment: Enrollment::Ambient,
            reason: Reason::LabelOnPod,
            inputs: Vec::new(),
        };
        let standing = Standing::of(&pod, Some(&view), &decision, true);
        let key = ("shop".parse().unwrap(), "web".parse().unwrap());
        reports
            .look(&key, &standing)
            .map(|(kind, reason, _)| (kind, reason))
    }

    fn enrolled() -> Option<Intent> {
        Some(Intent::Enrolled {
            fingerprint: "f".into(),
        })
    }

    #[test]
    fn a_failure_is_told_when_it_appears_when_it_becomes_another_and_when_it_is_mended() {
        let mut reports = Reports::default();
        let refused = Some(Reason::ZtunnelRefused);
        let out = || Some(Intent::Out);
        assert_eq!(look(&mut reports, out(), None), None);
        let told = look(&mut reports, out(), refused);
        assert_eq!(told, Some((Kind::Warning, Reason::ZtunnelRefused)));
        assert_eq!(look(&mut reports, Some(Intent::Enrolling), refused), None);
        let told = look(&mut reports, out(), Some(Reason::DependencyUnavailable));
        assert_eq!(told, Some((Kind::Warning, Reason::DependencyUnavailable)));
        let told = look(&mut reports, enrolled(), None);
        assert_eq!(told, Some((Kind::Normal, Reason::LabelOnPod)));
        assert_eq!(look(&mut reports, enrolled(), None), None);
    }

    #[test]
    fn a_refused_add_that_is_repeated_is_told_again() {
        let mut reports = Reports::default();
        let refused = Some(Reason::ZtunnelRefused);
        assert!(look(&mut reports, None, refused).is_some());
        assert_eq!(look(&mut reports, None, None), None);
        assert!(look(&mut reports, None, refused).is_some());
        let told = look(&mut reports, enrolled(), None);
        assert_eq!(told, Some((Kind::Normal, Reason::LabelOnPod)));
    }

    #[test]
    fn what_passes_is_neither_a_failure_nor_its_end() {
        let mut reports = Reports::default();
        let out = || Some(Intent::Out);
        assert!(look(&mut reports, out(), Some(Reason::ZtunnelRefused)).is_some());
        assert_eq!(look(&mut reports, out(), Some(Reason::Starting)), None);
        assert_eq!(
            look(&mut Reports::default(), out(), Some(Reason::NotSeeded)),
            None
        );
    }
}
