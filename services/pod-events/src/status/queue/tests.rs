use inpod_types::Reason;

use super::*;
use crate::{status::condition::Condition, testing};
use Annotation::{Absent, Enabled, Pending};

const ENABLED: Option<&str> = Some("enabled");

struct Fixture {
    queue: PatchQueue,
    now: Instant,
}

fn annotated(name: &str, observed: Option<&str>) -> Pod {
    Pod {
        redirection: observed.map(str::to_owned),
        ..testing::pod("shop", name)
    }
}

/// Returns a status whose condition may have any value.
fn annotation(value: Annotation) -> DesiredStatus {
    DesiredStatus {
        annotation: Some(value),
        condition: None,
    }
}

fn refused() -> PatchOutcome {
    PatchOutcome::Refused("no".to_owned())
}

fn unanswered() -> PatchOutcome {
    PatchOutcome::Unanswered("late".to_owned())
}

impl Fixture {
    fn new() -> Self {
        Self {
            queue: PatchQueue::default(),
            now: Instant::now(),
        }
    }

    fn after(&mut self, wait: Duration) -> &mut Self {
        self.now += wait;
        self
    }

    fn observe(&mut self, observed: Option<&str>, desired: Annotation) {
        let pod = annotated("web", observed);
        self.queue
            .observe(&pod, annotation(desired), None, self.now);
    }

    fn serve(&mut self, container_id: &str, observed: Option<&str>) {
        let pod = annotated("web", observed);
        let sandbox = testing::sandbox(container_id);
        self.queue
            .observe(&pod, annotation(Enabled), Some(&sandbox), self.now);
    }

    fn next(&mut self) -> Option<Annotation> {
        self.queue.next(self.now)?.status.annotation
    }

    /// Sends the next patch and completes the patch at once.
    fn patch(&mut self, outcome: PatchOutcome) {
        let request = self.queue.next(self.now).unwrap();
        self.queue.complete(&request, outcome, self.now);
    }

    fn answer(&mut self, written: Annotation, outcome: PatchOutcome) -> Option<Duration> {
        let request = PatchRequest {
            pod: annotated("web", None).pod,
            status: annotation(written),
            condition_before: None,
        };
        self.queue.complete(&request, outcome, self.now)
    }

    fn is_withdrawn(&self, observed: Option<&str>) -> bool {
        let pod = annotated("web", observed);
        self.queue.is_withdrawn(&pod, self.now)
    }

    fn count_late(&mut self) -> usize {
        self.queue.take_late(self.now).len()
    }
}

/// Returns the desired status of an enrolled pod with or without a failure.
fn both(reason: Option<Reason>) -> DesiredStatus {
    let condition = match reason {
        None => Condition::met(Reason::LabelOnPod, "in the mesh"),
        Some(reason) => Condition::unmet(reason, "not in the mesh"),
    };
    DesiredStatus {
        condition: Some(DesiredCondition::Set(condition)),
        ..annotation(Enabled)
    }
}

/// Returns the pod as the watch shows it after the status was written.
fn showing(status: &DesiredStatus) -> Pod {
    let condition = status.condition.as_ref();
    Pod {
        in_mesh: condition.and_then(DesiredCondition::shown).cloned(),
        ..annotated("web", status.annotation.and_then(Annotation::value))
    }
}

#[test]
fn a_condition_is_written_with_the_annotation_and_once_per_change() {
    let mut fixture = Fixture::new();
    let (now, met) = (fixture.now, both(None));
    let mut shown = annotated("web", None);
    for status in [&met, &both(Some(Reason::ZtunnelRefused)), &met] {
        for pod in [&shown, &showing(status)] {
            fixture.queue.observe(pod, status.clone(), None, now);
            let request = fixture.queue.next(now);
            assert_eq!(request.is_some(), *pod == shown, "{status:?}");
            if let Some(request) = request {
                assert_eq!(request.status.condition, status.condition);
                let is_first = shown.redirection.is_none();
                assert_eq!(request.status.annotation.is_some(), is_first);
                assert_eq!(request.condition_before, shown.in_mesh);
                fixture
                    .queue
                    .complete(&request, PatchOutcome::Accepted, now);
                assert_eq!(fixture.queue.next(now), None, "the watch lags");
            }
        }
        shown = showing(status);
    }
    let other_text = Condition::met(Reason::LabelOnPod, "in the mesh since today");
    let other_text = DesiredStatus {
        condition: Some(DesiredCondition::Set(other_text)),
        ..annotation(Enabled)
    };
    fixture.queue.observe(&shown, other_text, None, now);
    assert_eq!(fixture.queue.next(now), None, "only the message differs");
    let removed = DesiredStatus {
        condition: Some(DesiredCondition::Absent),
        ..annotation(Enabled)
    };
    fixture.queue.observe(&shown, removed.clone(), None, now);
    let request = fixture.queue.next(now).unwrap();
    assert_eq!(request.status.condition, removed.condition);
}

#[test]
fn a_condition_set_to_unknown_by_repair_is_replaced_once() {
    let mut fixture = Fixture::new();
    let (now, met) = (fixture.now, both(None));
    let unknown = ShownCondition {
        status: "Unknown".to_owned(),
        reason: "AgentAway".to_owned(),
    };
    let shown = Pod {
        in_mesh: Some(unknown.clone()),
        ..showing(&met)
    };
    let queue = &mut fixture.queue;
    queue.observe(&shown, DesiredStatus::default(), None, now);
    assert_eq!(queue.next(now), None, "not verified by this process yet");
    queue.observe(&shown, met.clone(), None, now);
    let request = queue.next(now).unwrap();
    assert_eq!(request.status.annotation, None);
    assert_eq!(request.status.condition, met.condition);
    assert_eq!(request.condition_before, Some(unknown));
    queue.complete(&request, PatchOutcome::Accepted, now);
    queue.observe(&showing(&met), met, None, now);
    assert_eq!(queue.next(now), None);
}

#[test]
fn an_annotation_is_written_where_conditions_are_refused() {
    let mut fixture = Fixture::new();
    fixture
        .queue
        .observe(&annotated("web", None), both(None), None, fixture.now);
    fixture.patch(refused());
    fixture.after(RETRY.longest);
    let request = fixture.queue.next(fixture.now).unwrap();
    assert_eq!(request.status, annotation(Enabled));
    let (queue, now) = (&mut fixture.queue, fixture.now);
    queue.complete(&request, PatchOutcome::Accepted, now);
    let request = queue.next(now).unwrap();
    assert_eq!(request.status.annotation, None);
    assert_eq!(request.status.condition, both(None).condition);
}

#[test]
fn one_patch_of_a_pod_is_in_flight_and_the_latest_value_follows() {
    let mut fixture = Fixture::new();
    fixture.observe(None, Enabled);
    assert_eq!(fixture.next(), Some(Enabled));
    fixture.observe(None, Pending);
    fixture.observe(None, Absent);
    assert_eq!(fixture.next(), None, "one is in flight");
    let lag = fixture.answer(Enabled, PatchOutcome::Accepted);
    assert_eq!(lag, None, "another value is desired");
    assert_eq!(fixture.next(), Some(Absent));
}

#[test]
fn an_accepted_patch_counts_until_the_watch_shows_it_or_60_s() {
    let mut fixture = Fixture::new();
    fixture.observe(None, Enabled);
    fixture.next().unwrap();
    let took = Duration::from_millis(7);
    fixture.after(took);
    let lag = fixture.answer(Enabled, PatchOutcome::Accepted);
    assert_eq!(lag, Some(took));
    fixture.observe(None, Enabled);
    assert_eq!(fixture.next(), None, "the watch lags");
    fixture.observe(ENABLED, Enabled);
    fixture.observe(None, Enabled);
    assert_eq!(fixture.next(), Some(Enabled), "removed since");
    fixture.answer(Enabled, PatchOutcome::Accepted);
    let wakeup = fixture.queue.next_wakeup(fixture.now);
    assert_eq!(wakeup, Some(fixture.now + WATCH_LAG_TIMEOUT));
    fixture.after(WATCH_LAG_TIMEOUT);
    assert_eq!(fixture.next(), Some(Enabled), "never shown");
}

#[test]
fn a_failed_patch_is_retried_later_and_a_new_value_sent_at_once() {
    let mut fixture = Fixture::new();
    fixture.observe(None, Pending);
    fixture.patch(refused());
    fixture.observe(None, Pending);
    assert_eq!(fixture.next(), None, "the same value waits for its retry");
    fixture.observe(None, Enabled);
    assert_eq!(fixture.queue.failures(), Some((1, "no".to_owned())));
    assert_eq!(fixture.next(), Some(Enabled));
    fixture.answer(Enabled, PatchOutcome::Accepted);
    assert_eq!(fixture.queue.failures(), None);
}

#[test]
fn retry_delays_grow_to_half_a_minute_until_the_server_is_back() {
    let mut fixture = Fixture::new();
    fixture.observe(None, Enabled);
    for attempt in 0..12 {
        fixture.patch(unanswered());
        let wait = fixture.queue.next_wakeup(fixture.now).unwrap() - fixture.now;
        let longest = RETRY.delay(attempt);
        let is_expected = wait >= longest / 2 && wait <= longest;
        assert!(is_expected, "{attempt}: {wait:?}");
        fixture.after(wait);
    }
    fixture.patch(unanswered());
    assert_eq!(fixture.next(), None);
    fixture.queue.retry_now();
    assert_eq!(fixture.next(), Some(Enabled));
}

#[test]
fn a_patch_that_the_watch_shows_before_the_answer_leaves_no_entry() {
    let mut fixture = Fixture::new();
    let status = both(None);
    for shown in [annotated("web", None), showing(&status)] {
        fixture
            .queue
            .observe(&shown, status.clone(), None, fixture.now);
    }
    assert!(fixture.queue.0.is_empty(), "nothing was sent");
    let before = annotated("web", None);
    fixture
        .queue
        .observe(&before, status.clone(), None, fixture.now);
    let request = fixture.queue.next(fixture.now).unwrap();
    let after = showing(&status);
    fixture.queue.observe(&after, status, None, fixture.now);
    assert_eq!(fixture.queue.0.len(), 1, "the patch is in flight");
    let accepted = PatchOutcome::Accepted;
    let took = fixture.queue.complete(&request, accepted, fixture.now);
    assert_eq!(took, Some(Duration::ZERO));
    assert!(fixture.queue.0.is_empty());
}

#[test]
fn a_pod_in_sync_has_no_entry() {
    let mut fixture = Fixture::new();
    fixture.observe(None, Enabled);
    fixture.patch(PatchOutcome::Accepted);
    assert_eq!(fixture.queue.0.len(), 1, "the watch may lag");
    fixture.observe(ENABLED, Enabled);
    assert!(fixture.queue.0.is_empty());
}

#[test]
fn a_pod_that_is_gone_is_not_patched_again() {
    let mut fixture = Fixture::new();
    fixture.observe(None, Enabled);
    fixture.patch(PatchOutcome::Gone);
    fixture.observe(None, Absent);
    assert_eq!(fixture.next(), None);
    assert!(fixture.is_withdrawn(ENABLED));
}

#[test]
fn a_pod_is_withdrawn_once_no_patch_can_still_enable_it() {
    let mut fixture = Fixture::new();
    assert!(fixture.is_withdrawn(None) && !fixture.is_withdrawn(ENABLED));
    fixture.observe(None, Enabled);
    assert!(!fixture.is_withdrawn(None), "`enabled` is to be sent");
    fixture.observe(None, Absent);
    assert!(fixture.is_withdrawn(None), "nothing is to be sent");
    fixture.observe(None, Enabled);
    fixture.next().unwrap();
    fixture.observe(None, Absent);
    assert!(!fixture.is_withdrawn(None), "in flight");
    fixture.answer(Enabled, unanswered());
    assert!(!fixture.is_withdrawn(None), "perhaps written");
    fixture.queue.retry_now();
    fixture.patch(refused());
    fixture.observe(ENABLED, Absent);
    assert!(!fixture.is_withdrawn(None), "still unknown");
    fixture.queue.retry_now();
    fixture.patch(PatchOutcome::Accepted);
    assert!(fixture.is_withdrawn(ENABLED), "the watch lags");
}

#[test]
fn eight_patches_are_in_flight_at_once_and_the_oldest_is_first() {
    let mut fixture = Fixture::new();
    for number in (0..20).rev() {
        let pod = annotated(&format!("web-{number:02}"), None);
        let desired = annotation(Enabled);
        fixture.queue.observe(&pod, desired, None, fixture.now);
        fixture.after(Duration::from_millis(1));
    }
    let first = fixture.queue.next(fixture.now).unwrap();
    assert_eq!(first.pod.name.as_str(), "web-19");
    let more = std::iter::from_fn(|| fixture.next()).count();
    assert_eq!(1 + more, MAX_IN_FLIGHT);
    let (queue, now) = (&mut fixture.queue, fixture.now);
    assert_eq!(queue.next_wakeup(now), None, "an answer is due");
    queue.complete(&first, PatchOutcome::Accepted, now);
    assert!(queue.next(now).is_some() && queue.next(now).is_none());
    assert_eq!(queue.unmet(now), 19);
}

#[test]
fn a_pod_that_serves_unannotated_is_reported_once_per_sandbox() {
    let mut fixture = Fixture::new();
    fixture.serve("c1", None);
    fixture.after(ANNOTATION_TIMEOUT / 2).serve("c1", ENABLED);
    fixture.serve("c1", None);
    fixture.after(ANNOTATION_TIMEOUT / 2).serve("c1", None);
    assert_eq!(fixture.count_late(), 0, "annotated in time");
    let wakeup = fixture.queue.next_wakeup(fixture.now).unwrap();
    assert_eq!(wakeup, fixture.now + ANNOTATION_TIMEOUT / 2);
    fixture.after(ANNOTATION_TIMEOUT / 2);
    assert_eq!(fixture.count_late(), 1);
    fixture.serve("c1", ENABLED);
    fixture.serve("c1", None);
    fixture.after(ANNOTATION_TIMEOUT);
    assert_eq!(fixture.count_late(), 0, "reported once");
    fixture.serve("c2", None);
    fixture.after(ANNOTATION_TIMEOUT);
    assert_eq!(fixture.count_late(), 1, "another sandbox");
}

#[test]
fn an_annotation_shown_or_accepted_in_time_is_never_late() {
    for is_shown_first in [true, false] {
        for outcome in [PatchOutcome::Accepted, unanswered()] {
            let mut fixture = Fixture::new();
            fixture.serve("c1", None);
            assert_eq!(fixture.next(), Some(Enabled));
            if is_shown_first {
                fixture.serve("c1", ENABLED);
            }
            fixture.answer(Enabled, outcome.clone());
            fixture.after(ANNOTATION_TIMEOUT);
            let is_late = !is_shown_first && outcome != PatchOutcome::Accepted;
            let count = usize::from(is_late);
            assert_eq!(fixture.count_late(), count, "{is_shown_first} {outcome:?}");
        }
    }
}

#[test]
fn an_annotation_refused_for_a_minute_counts_as_refused() {
    let mut fixture = Fixture::new();
    let count = |fixture: &Fixture| fixture.queue.refused(fixture.now);
    fixture.observe(ENABLED, Absent);
    for _ in 0..2 {
        assert_eq!(count(&fixture), 0);
        fixture.after(Duration::from_secs(30)).next().unwrap();
        fixture.answer(Absent, refused());
    }
    fixture.after(Duration::from_secs(30));
    assert_eq!(count(&fixture), 1);
    fixture.patch(unanswered());
    assert_eq!(count(&fixture), 0, "the server may have written it");
}
