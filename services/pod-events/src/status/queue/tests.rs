use super::*;
use crate::testing;

fn key(name: &str) -> PodKey {
    ("shop".parse().unwrap(), name.parse().unwrap())
}

struct Fixture {
    queue: PatchQueue,
    now: Instant,
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

    fn observe_named(&mut self, name: &str, observed: Option<&str>, desired: Option<Annotation>) {
        let uid = "uid".parse().unwrap();
        let observation = PodObservation {
            uid: &uid,
            observed,
            desired,
            serving_sandbox: None,
        };
        self.queue.observe(&key(name), &observation, self.now);
    }

    fn observe(&mut self, observed: Option<&str>, desired: Annotation) {
        self.observe_named("web", observed, Some(desired));
    }

    fn serves(&mut self, container_id: &str, observed: Option<&str>) {
        let uid = "uid".parse().unwrap();
        let observation = PodObservation {
            uid: &uid,
            observed,
            desired: Some(Annotation::Enabled),
            serving_sandbox: Some(&testing::sandbox(container_id)),
        };
        self.queue.observe(&key("web"), &observation, self.now);
    }

    fn next(&mut self) -> Option<PatchRequest> {
        self.queue.next(self.now)
    }

    fn sent(&mut self) -> Annotation {
        self.next().unwrap().annotation
    }

    fn answer(&mut self, annotation: Annotation, answer: PatchOutcome) -> Option<Duration> {
        let request = PatchRequest {
            key: key("web"),
            uid: "uid".parse().unwrap(),
            annotation,
        };
        self.queue.complete(&request, answer, self.now)
    }

    fn is_withdrawn(&self, observed: Option<&str>) -> bool {
        let uid = "uid".parse().unwrap();
        self.queue
            .is_withdrawn(&key("web"), &uid, observed, self.now)
    }
}

fn refused() -> PatchOutcome {
    PatchOutcome::Refused("no".to_owned())
}

fn unanswered() -> PatchOutcome {
    PatchOutcome::Unanswered("late".to_owned())
}

#[test]
fn a_pod_that_is_in_sync_or_may_keep_its_value_has_no_patch_and_no_entry() {
    let mut fixture = Fixture::new();
    fixture.observe(Some("enabled"), Annotation::Enabled);
    fixture.observe_named("api", None, Some(Annotation::Absent));
    fixture.observe_named("db", Some("enabled"), None);
    assert_eq!(fixture.next(), None);
    assert!(fixture.queue.entries.is_empty());
}

#[test]
fn one_patch_of_a_pod_is_in_flight_and_the_latest_value_follows_it() {
    let mut fixture = Fixture::new();
    fixture.observe(None, Annotation::Enabled);
    assert_eq!(fixture.sent(), Annotation::Enabled);
    fixture.observe(None, Annotation::Pending);
    fixture.observe(None, Annotation::Absent);
    assert_eq!(fixture.next(), None, "one is under way");
    assert_eq!(
        fixture.answer(Annotation::Enabled, PatchOutcome::Accepted),
        None
    );
    assert_eq!(fixture.sent(), Annotation::Absent);
}

#[test]
fn an_accepted_patch_counts_until_the_watch_shows_it_and_its_lag_is_returned() {
    let mut fixture = Fixture::new();
    fixture.observe(None, Annotation::Enabled);
    fixture.next().unwrap();
    let took = fixture
        .after(Duration::from_millis(7))
        .answer(Annotation::Enabled, PatchOutcome::Accepted);
    assert_eq!(took, Some(Duration::from_millis(7)));
    fixture.observe(None, Annotation::Enabled);
    assert_eq!(fixture.next(), None, "the watch lags");
    fixture.observe(Some("enabled"), Annotation::Enabled);
    assert!(fixture.queue.entries.is_empty());
    fixture.observe(None, Annotation::Enabled);
    assert_eq!(
        fixture.sent(),
        Annotation::Enabled,
        "somebody has removed it"
    );
}

#[test]
fn a_watch_that_is_faster_than_the_response_of_the_patch_is_trusted() {
    let mut fixture = Fixture::new();
    fixture.observe(None, Annotation::Enabled);
    fixture.next().unwrap();
    fixture.observe(Some("enabled"), Annotation::Enabled);
    fixture.answer(Annotation::Enabled, PatchOutcome::Accepted);
    fixture.observe(None, Annotation::Enabled);
    assert_eq!(fixture.sent(), Annotation::Enabled, "removed since");
}

#[test]
fn a_patch_that_the_watch_never_shows_is_observed_again() {
    let mut fixture = Fixture::new();
    fixture.observe(None, Annotation::Enabled);
    fixture.next().unwrap();
    fixture.answer(Annotation::Enabled, PatchOutcome::Accepted);
    assert_eq!(
        fixture.queue.next_wakeup(fixture.now),
        Some(fixture.now + WATCH_LAG_TIMEOUT)
    );
    fixture.after(WATCH_LAG_TIMEOUT);
    assert_eq!(fixture.queue.expired(fixture.now).1, [key("web")]);
    fixture.observe(None, Annotation::Enabled);
    assert_eq!(fixture.sent(), Annotation::Enabled);
}

#[test]
fn a_failed_patch_is_retried_later_and_a_new_value_is_sent_at_once() {
    let mut fixture = Fixture::new();
    fixture.observe(None, Annotation::Pending);
    fixture.next().unwrap();
    fixture.answer(Annotation::Pending, refused());
    fixture.observe(None, Annotation::Pending);
    assert_eq!(fixture.next(), None, "the same value waits for its retry");
    assert_eq!(fixture.queue.failures(), Some((1, "no".to_owned())));
    fixture.observe(None, Annotation::Enabled);
    assert_eq!(fixture.sent(), Annotation::Enabled);
    fixture.answer(Annotation::Enabled, PatchOutcome::Accepted);
    assert_eq!(fixture.queue.failures(), None);
}

#[test]
fn the_delays_grow_to_half_a_minute_and_end_when_the_server_answers_again() {
    let mut fixture = Fixture::new();
    fixture.observe(None, Annotation::Enabled);
    for attempt in 0..12 {
        assert_eq!(fixture.sent(), Annotation::Enabled);
        fixture.answer(Annotation::Enabled, unanswered());
        let wait = fixture.queue.next_wakeup(fixture.now).unwrap() - fixture.now;
        let whole = RETRY_INTERVAL[0]
            .saturating_mul(1 << attempt.min(6))
            .min(RETRY_INTERVAL[1]);
        assert!(wait >= whole / 2 && wait <= whole, "{attempt}: {wait:?}");
        fixture.after(wait);
    }
    fixture.next().unwrap();
    fixture.answer(Annotation::Enabled, unanswered());
    assert_eq!(fixture.next(), None);
    fixture.queue.retry_now(fixture.now);
    assert_eq!(fixture.sent(), Annotation::Enabled);
}

#[test]
fn a_pod_that_is_gone_is_not_patched_again() {
    let mut fixture = Fixture::new();
    fixture.observe(None, Annotation::Enabled);
    fixture.next().unwrap();
    fixture.answer(Annotation::Enabled, PatchOutcome::Gone);
    fixture.observe(None, Annotation::Absent);
    assert_eq!((fixture.next(), fixture.queue.unmet()), (None, 0));
    assert!(fixture.is_withdrawn(Some("enabled")));
    fixture.queue.remove(&key("web"));
    assert!(fixture.queue.entries.is_empty());
}

#[test]
fn a_patch_outcome_of_a_predecessor_does_not_affect_its_successor() {
    let mut fixture = Fixture::new();
    fixture.observe(None, Annotation::Enabled);
    let request = fixture.next().unwrap();
    let uid = "successor".parse().unwrap();
    let observation = PodObservation {
        uid: &uid,
        observed: None,
        desired: Some(Annotation::Enabled),
        serving_sandbox: None,
    };
    fixture
        .queue
        .observe(&key("web"), &observation, fixture.now);
    fixture
        .queue
        .complete(&request, PatchOutcome::Gone, fixture.now);
    assert_eq!(fixture.next().unwrap().uid, uid);
}

#[test]
fn a_pod_has_withdrawn_when_that_is_accepted_or_shown_and_not_while_a_patch_is_in_flight() {
    let mut fixture = Fixture::new();
    assert!(fixture.is_withdrawn(None) && !fixture.is_withdrawn(Some("enabled")));
    fixture.observe(None, Annotation::Enabled);
    assert!(!fixture.is_withdrawn(None), "`enabled` is to be sent");
    fixture.next().unwrap();
    assert!(!fixture.is_withdrawn(None), "`enabled` may arrive yet");
    fixture.observe(None, Annotation::Absent);
    fixture.answer(Annotation::Enabled, unanswered());
    assert!(!fixture.is_withdrawn(None), "nobody knows whether it has");
    fixture.queue.retry_now(fixture.now);
    assert_eq!(fixture.sent(), Annotation::Absent);
    assert!(!fixture.is_withdrawn(None));
    fixture.answer(Annotation::Absent, PatchOutcome::Accepted);
    assert!(fixture.is_withdrawn(None));
}

#[test]
fn an_accepted_removal_counts_before_the_watch_shows_it_and_a_refused_one_does_not() {
    let mut fixture = Fixture::new();
    fixture.observe(Some("enabled"), Annotation::Absent);
    fixture.next().unwrap();
    fixture.answer(Annotation::Absent, refused());
    assert!(!fixture.is_withdrawn(Some("enabled")));
    fixture.queue.retry_now(fixture.now);
    fixture.next().unwrap();
    fixture.answer(Annotation::Absent, PatchOutcome::Accepted);
    assert!(fixture.is_withdrawn(Some("enabled")));
}

#[test]
fn eight_patches_are_in_flight_at_once_and_the_oldest_change_comes_first() {
    let mut fixture = Fixture::new();
    for number in (0..20).rev() {
        fixture.observe_named(&format!("web-{number:02}"), None, Some(Annotation::Enabled));
        fixture.after(Duration::from_millis(1));
    }
    let first = fixture.next().unwrap();
    assert_eq!(first.key, key("web-19"));
    let more = std::iter::from_fn(|| fixture.next()).count();
    assert_eq!(1 + more, MAX_IN_FLIGHT);
    assert_eq!(
        fixture.queue.next_wakeup(fixture.now),
        None,
        "an answer is waited for"
    );
    fixture
        .queue
        .complete(&first, PatchOutcome::Accepted, fixture.now);
    assert!(fixture.next().is_some() && fixture.next().is_none());
    assert_eq!(fixture.queue.unmet(), 19);
}

#[test]
fn a_pod_that_serves_unannotated_is_reported_after_ten_seconds_once_per_sandbox() {
    let mut fixture = Fixture::new();
    fixture.serves("c1", None);
    fixture
        .after(ANNOTATION_TIMEOUT - Duration::from_secs(1))
        .serves("c1", None);
    assert!(fixture.queue.expired(fixture.now).0.is_empty());
    fixture.after(Duration::from_secs(1));
    assert_eq!(fixture.queue.expired(fixture.now).0, [key("web")]);
    fixture.serves("c1", Some("enabled"));
    fixture.serves("c1", None);
    fixture.after(ANNOTATION_TIMEOUT);
    assert!(
        fixture.queue.expired(fixture.now).0.is_empty(),
        "reported once"
    );
    fixture.serves("c2", None);
    fixture.after(ANNOTATION_TIMEOUT);
    assert_eq!(fixture.queue.expired(fixture.now).0, [key("web")]);
}

#[test]
fn a_pod_that_is_annotated_in_time_is_not_reported() {
    let mut fixture = Fixture::new();
    fixture.serves("c1", None);
    fixture
        .after(ANNOTATION_TIMEOUT / 2)
        .serves("c1", Some("enabled"));
    assert!(fixture.queue.entries.is_empty());
    fixture.serves("c1", None);
    fixture.after(ANNOTATION_TIMEOUT / 2);
    assert!(fixture.queue.expired(fixture.now).0.is_empty());
}

#[test]
fn an_annotation_that_is_refused_for_a_minute_holds_up_no_uninstall() {
    let mut fixture = Fixture::new();
    let is_refused = |fixture: &Fixture| {
        let uid = "uid".parse().unwrap();
        fixture.queue.is_refused(&key("web"), &uid, fixture.now)
    };
    fixture.observe(Some("enabled"), Annotation::Absent);
    for _ in 0..2 {
        assert!(!is_refused(&fixture));
        fixture.after(Duration::from_secs(30));
        let annotation = fixture.sent();
        fixture.answer(annotation, refused());
    }
    fixture.after(Duration::from_secs(30));
    assert!(is_refused(&fixture));
    let annotation = fixture.sent();
    fixture.answer(annotation, unanswered());
    assert!(!is_refused(&fixture), "the server may have written it");
}
