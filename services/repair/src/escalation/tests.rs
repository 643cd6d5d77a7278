use super::*;
use crate::{detect::FailedInit, diagnosis::MissingRedirection, testing};

const WAIT: Duration = Duration::from_secs(30);

struct Fixture {
    escalation: Escalation,
    now: Instant,
}

impl Fixture {
    /// Returns a fixture with the modes whose letters are in the text: `r`, `l` and `d`.
    fn new(modes: &str) -> Self {
        Self::limited(modes, 600)
    }

    fn limited(modes: &str, per_minute: u32) -> Self {
        let modes = Modes {
            repair: modes.contains('r'),
            label: modes.contains('l'),
            delete: modes.contains('d'),
            wait: WAIT,
        };
        let label = Label {
            key: "broken".to_owned(),
            value: "true".to_owned(),
        };
        let bucket = TokenBucket::new(per_minute, Duration::from_secs(60) / per_minute);
        Self {
            escalation: Escalation::new(modes, label, bucket),
            now: Instant::now() + Duration::from_secs(100_000),
        }
    }

    fn later(&mut self, time: Duration) -> &mut Self {
        self.now += time;
        self
    }

    fn reconcile(&mut self, pod: &Pod, diagnosis: &Diagnosis) -> Vec<String> {
        let steps = self.escalation.reconcile(pod, diagnosis, self.now);
        steps.iter().map(describe).collect()
    }

    fn record_result(
        &mut self,
        pod: &Pod,
        change: Change,
        answer: &Result<(), ChangeError>,
    ) -> Vec<String> {
        let steps = self.escalation.record_result(pod, change, answer, self.now);
        steps.iter().map(describe).collect()
    }
}

fn describe(step: &Step) -> String {
    match step {
        Step::Report(note) => format!("{}{}", if note.is_warning { "!" } else { "" }, note.reason),
        Step::Count(action, outcome) => format!("{action:?} {outcome:?}"),
        Step::Change(change) => format!("{change:?}"),
    }
}

fn pod(name: &str, label: Option<&str>) -> Pod {
    Pod {
        label: label.map(str::to_owned),
        failed_init: Some(FailedInit {
            container: "istio-validation".to_owned(),
            exit_code: 126,
            message: String::new(),
            started_at: None,
        }),
        ..testing::pod(name)
    }
}

fn missing(has_failed: bool, has_proxy: bool, is_known: bool) -> Diagnosis {
    Diagnosis::Missing(MissingRedirection {
        has_failed,
        has_proxy,
        is_known,
        why: "no table".to_owned(),
    })
}

fn failed() -> Diagnosis {
    missing(true, true, true)
}

fn again() -> Diagnosis {
    Diagnosis::Permanent(PermanentFailure::FailedAgain("again".to_owned()))
}

fn unwanted() -> Diagnosis {
    Diagnosis::Permanent(PermanentFailure::NotDesired("excluded".to_owned()))
}

const NOTHING: [&str; 0] = [];
const FAILED: [&str; 2] = ["Repair Fail", "!RepairBrokenPod"];
const REPAIRED: [&str; 2] = ["Repair Success", "RepairBrokenPod"];

#[test]
fn a_pod_that_is_redirected_in_time_is_neither_labelled_nor_deleted() {
    let (mut fixture, web) = (Fixture::new("rld"), pod("web", None));
    assert_eq!(fixture.reconcile(&web, &failed()), NOTHING);
    assert_eq!(fixture.later(WAIT / 2).reconcile(&web, &failed()), NOTHING);
    assert_eq!(fixture.reconcile(&web, &Diagnosis::Repaired), REPAIRED);
    // The kubelet may restart the container only after a long delay.
    assert_eq!(
        fixture
            .later(WAIT * 10)
            .reconcile(&web, &Diagnosis::Repaired),
        NOTHING
    );
    assert_eq!(fixture.reconcile(&web, &Diagnosis::Healthy(true)), NOTHING);
    assert!(!fixture.escalation.has_open_cases());
}

#[test]
fn a_container_that_passes_before_it_is_reconciled_counts_as_repaired() {
    let (mut fixture, web) = (Fixture::new("r"), pod("web", None));
    assert_eq!(fixture.reconcile(&web, &failed()), NOTHING);
    assert_eq!(fixture.reconcile(&web, &Diagnosis::Healthy(true)), REPAIRED);
    assert_eq!(fixture.reconcile(&web, &Diagnosis::Healthy(true)), NOTHING);
}

#[test]
fn each_action_is_given_its_time_before_the_next() {
    let (mut fixture, bare) = (Fixture::new("rld"), pod("web", None));
    assert_eq!(fixture.reconcile(&bare, &failed()), NOTHING);
    let due = fixture.later(WAIT).reconcile(&bare, &failed());
    assert_eq!(due, [&FAILED[..], &["Label"]].concat());
    assert_eq!(
        fixture.record_result(&bare, Change::Label, &Ok(())),
        ["Label Success", "!LabelBrokenPod"]
    );
    assert_eq!(
        fixture.reconcile(&bare, &failed()),
        NOTHING,
        "the watch does not show it yet"
    );
    let labelled = pod("web", Some("true"));
    assert_eq!(fixture.reconcile(&labelled, &failed()), NOTHING);
    assert_eq!(
        fixture
            .later(WAIT - Duration::from_millis(1))
            .reconcile(&labelled, &failed()),
        NOTHING
    );
    assert_eq!(
        fixture
            .later(Duration::from_millis(1))
            .reconcile(&labelled, &failed()),
        ["Delete"]
    );
    assert_eq!(
        fixture.record_result(&labelled, Change::Delete, &Ok(())),
        ["Delete Success", "!DeleteBrokenPod"]
    );
    assert_eq!(
        fixture.reconcile(&labelled, &failed()),
        NOTHING,
        "the watch does not show it yet"
    );
}

/// Each row has the modes, the diagnosis, the reported outcome, and the actions taken after the waiting time.
fn rows() -> Vec<(
    &'static str,
    Diagnosis,
    &'static str,
    &'static [&'static str],
)> {
    // If pod-events does not work on the pod, a replacement would fare no better.
    let stranger = || missing(true, true, false);
    // A running pod serves. A missing ztunnel often affects all pods of a node.
    let (no_proxy, no_ztunnel) = (
        || missing(false, true, true),
        || missing(false, false, true),
    );
    vec![
        ("", failed(), "", &[]),
        ("l", failed(), "", &["Label"]),
        ("d", failed(), "", &["Delete"]),
        ("ld", failed(), "", &["Label"]),
        ("r", failed(), "Repair Fail", &[]),
        ("rd", failed(), "Repair Fail", &["Delete"]),
        ("rl", failed(), "Repair Fail", &["Label"]),
        ("rd", stranger(), "Repair Fail", &[]),
        ("d", stranger(), "", &[]),
        ("rl", stranger(), "Repair Fail", &["Label"]),
        ("rd", no_proxy(), "Repair Fail", &[]),
        ("rl", no_proxy(), "Repair Fail", &["Label"]),
        ("rld", no_ztunnel(), "Repair Fail", &[]),
        ("rd", again(), "Repair Fail", &["Delete"]),
        ("d", again(), "", &["Delete"]),
        ("rd", unwanted(), "Repair Skip", &[]),
        ("d", unwanted(), "", &[]),
        ("rld", unwanted(), "Repair Skip", &["Label"]),
    ]
}

#[test]
fn what_is_done_when_time_is_up_follows_from_the_modes_and_from_what_is_wrong() {
    for (modes, diagnosis, reported, done) in rows() {
        let (mut fixture, web) = (Fixture::new(modes), pod("web", None));
        let mut found = fixture.reconcile(&web, &diagnosis);
        if found.is_empty() {
            found = fixture.later(WAIT).reconcile(&web, &diagnosis);
        }
        let reported = [reported, "!RepairBrokenPod"]
            .into_iter()
            .filter(|_| !reported.is_empty());
        let wanted: Vec<_> = reported.chain(done.iter().copied()).collect();
        assert_eq!(found, wanted, "{modes} {diagnosis:?}");
    }
}

#[test]
fn in_place_is_waited_for_where_it_may_help_alone() {
    for (modes, diagnosis, at_once) in [
        ("rd", failed(), false),
        ("d", failed(), true),
        ("rd", again(), true),
        ("rl", unwanted(), true),
    ] {
        let (mut fixture, web) = (Fixture::new(modes), pod("web", None));
        let found = fixture.reconcile(&web, &diagnosis);
        assert_eq!(!found.is_empty(), at_once, "{modes} {diagnosis:?}");
    }
}

#[test]
fn what_is_reported_is_reported_once() {
    let (mut fixture, web) = (Fixture::new("r"), pod("web", None));
    fixture.reconcile(&web, &failed());
    assert_eq!(fixture.later(WAIT).reconcile(&web, &failed()), FAILED);
    assert_eq!(fixture.escalation.unhealthy(), 1);
    for _ in 0..10 {
        assert_eq!(fixture.later(WAIT).reconcile(&web, &failed()), NOTHING);
    }
    assert_eq!(fixture.reconcile(&web, &Diagnosis::Repaired), REPAIRED);
    assert_eq!(fixture.escalation.unhealthy(), 0);
    assert_eq!(
        fixture.reconcile(&web, &again()),
        FAILED,
        "another failure is news"
    );
}

#[test]
fn a_label_that_was_there_before_is_counted_as_skipped_and_the_next_action_waits_from_now() {
    let (mut fixture, web) = (Fixture::new("ld"), pod("web", Some("by hand")));
    assert_eq!(fixture.reconcile(&web, &failed()), ["Label Skip"]);
    assert_eq!(fixture.reconcile(&web, &failed()), NOTHING);
    assert_eq!(fixture.later(WAIT).reconcile(&web, &failed()), ["Delete"]);
}

#[test]
fn our_label_goes_when_nothing_is_missing_any_more() {
    let mut fixture = Fixture::new("rl");
    let ours = Pod {
        failed_init: None,
        ..pod("web", Some("true"))
    };
    for is_redirected in [true, false] {
        assert_eq!(
            fixture.reconcile(&ours, &Diagnosis::Healthy(is_redirected)),
            ["Unlabel"]
        );
    }
    let refused = Err(ChangeError::Failed("no".to_owned()));
    assert_eq!(
        fixture.record_result(&ours, Change::Unlabel, &refused),
        NOTHING
    );
    assert_eq!(
        fixture.reconcile(&ours, &Diagnosis::Healthy(true)),
        NOTHING,
        "it was refused a moment ago"
    );
    assert_eq!(
        fixture
            .later(WAIT)
            .reconcile(&ours, &Diagnosis::Healthy(true)),
        ["Unlabel"]
    );
    assert_eq!(fixture.reconcile(&ours, &Diagnosis::Unknown), NOTHING);
    assert_eq!(
        fixture.reconcile(&pod("web", Some("by hand")), &Diagnosis::Healthy(true)),
        NOTHING
    );
    assert!(!fixture.escalation.has_open_cases());
    assert_eq!(
        Fixture::new("rd").reconcile(&ours, &Diagnosis::Healthy(true)),
        NOTHING,
        "who may not label"
    );
}

#[test]
fn a_change_that_fails_is_reported_and_waits_longer_each_time() {
    let (mut fixture, web) = (Fixture::new("d"), pod("web", None));
    let refused = Err(ChangeError::Failed("the API server answers 403".to_owned()));
    let mut tries = 0;
    for _ in 0..600 {
        if fixture
            .later(Duration::from_secs(1))
            .reconcile(&web, &failed())
            == ["Delete"]
        {
            tries += 1;
            assert_eq!(
                fixture.record_result(&web, Change::Delete, &refused),
                ["Delete Fail", "!DeleteBrokenPod"]
            );
        }
    }
    // The tries come 0, 5, 15, 35, 75, 155, 315 and 615 seconds after the first; the last is beyond the end of this
    // test.
    assert_eq!(tries, 7);
}

#[test]
fn a_pod_that_has_changed_meanwhile_is_reconciled_again_soon() {
    let (mut fixture, web) = (Fixture::new("d"), pod("web", None));
    assert_eq!(fixture.reconcile(&web, &failed()), ["Delete"]);
    assert_eq!(
        fixture.record_result(&web, Change::Delete, &Err(ChangeError::Changed)),
        ["Delete Skip"]
    );
    assert_eq!(fixture.reconcile(&web, &failed()), NOTHING);
    assert_eq!(
        fixture
            .later(CHANGED_RETRY_INTERVAL)
            .reconcile(&web, &Diagnosis::Healthy(true)),
        NOTHING
    );
    assert_eq!(fixture.reconcile(&web, &failed()), ["Delete"]);
}

#[test]
fn a_node_changes_no_more_pods_in_a_minute_than_it_may() {
    let mut fixture = Fixture::limited("d", 3);
    let pods: Vec<_> = (0..50)
        .map(|number| pod(&format!("web-{number}"), None))
        .collect();
    let mut deleted = Vec::new();
    for second in 0..120 {
        for web in &pods {
            if fixture.reconcile(web, &failed()) == ["Delete"] {
                fixture.record_result(web, Change::Delete, &Ok(()));
                deleted.push(second);
            }
        }
        fixture.later(Duration::from_secs(1));
    }
    let of = |from, to| {
        deleted
            .iter()
            .filter(|second| (from..to).contains(*second))
            .count()
    };
    assert_eq!((of(0, 1), of(0, 60), of(60, 120)), (3, 5, 3), "{deleted:?}");
}

#[test]
fn a_pod_that_ends_or_is_gone_is_forgotten() {
    let (mut fixture, web) = (Fixture::new("d"), pod("web", None));
    fixture.reconcile(&web, &failed());
    let ending = Pod {
        is_ending: true,
        ..web.clone()
    };
    assert_eq!(fixture.reconcile(&ending, &failed()), NOTHING);
    assert!(!fixture.escalation.has_open_cases());
    fixture.reconcile(&web, &failed());
    fixture.escalation.retain(|_| false);
    assert!(!fixture.escalation.has_open_cases());
}

#[test]
fn while_the_state_is_unknown_nothing_is_done_and_the_time_goes_on() {
    let (mut fixture, web) = (Fixture::new("rd"), pod("web", None));
    fixture.reconcile(&web, &failed());
    assert_eq!(
        fixture.later(WAIT).reconcile(&web, &Diagnosis::Unknown),
        NOTHING
    );
    assert_eq!(
        fixture.reconcile(&web, &failed()),
        [&FAILED[..], &["Delete"]].concat()
    );
}
