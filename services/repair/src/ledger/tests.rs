use std::num::NonZeroU16;

use super::*;
use crate::{broken::Broken, diagnosis::Lack};

const WAIT: Duration = Duration::from_secs(30);

/// A ledger, and a clock that has run for long.
struct Desk {
    ledger: Ledger,
    now: Instant,
}

impl Desk {
    /// With modes, of which `r`, `l` and `d` are on.
    fn new(modes: &str) -> Self {
        Self::limited(modes, 600)
    }

    fn limited(modes: &str, per_minute: u16) -> Self {
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
        let bucket = Bucket::per_minute(NonZeroU16::new(per_minute).unwrap());
        Self {
            ledger: Ledger::new(modes, label, bucket),
            now: Instant::now() + Duration::from_secs(100_000),
        }
    }

    fn later(&mut self, time: Duration) -> &mut Self {
        self.now += time;
        self
    }

    fn look(&mut self, pod: &Pod, diagnosis: &Diagnosis) -> Vec<String> {
        let steps = self.ledger.look(pod, diagnosis, self.now);
        steps.iter().map(word).collect()
    }

    fn did(&mut self, pod: &Pod, change: Change, answer: &Result<(), ChangeError>) -> Vec<String> {
        let steps = self.ledger.did(pod, change, answer, self.now);
        steps.iter().map(word).collect()
    }
}

/// A step in a word or two.
fn word(step: &Step) -> String {
    match step {
        Step::Tell(note) => format!("{}{}", if note.is_warning { "!" } else { "" }, note.reason),
        Step::Count(way, came) => format!("{way:?} {came:?}"),
        Step::Change(change) => format!("{change:?}"),
    }
}

fn pod(name: &str, label: Option<&str>) -> Pod {
    Pod {
        pod: inpod_types::PodRef {
            namespace: "shop".parse().unwrap(),
            name: name.parse().unwrap(),
            uid: format!("uid-of-{name}").parse().unwrap(),
        },
        version: "7".to_owned(),
        label: label.map(str::to_owned),
        is_ending: false,
        broken: Some(Broken {
            container: "istio-validation".to_owned(),
            exit_code: 126,
            message: String::new(),
            began: None,
        }),
    }
}

fn lacks(has_failed: bool, has_proxy: bool, is_known: bool) -> Diagnosis {
    Diagnosis::Lacks(Lack {
        has_failed,
        has_proxy,
        is_known,
        why: "no table".to_owned(),
    })
}

fn failed() -> Diagnosis {
    lacks(true, true, true)
}

fn again() -> Diagnosis {
    Diagnosis::Hopeless(Hopeless::Again("again".to_owned()))
}

fn unwanted() -> Diagnosis {
    Diagnosis::Hopeless(Hopeless::Unwanted("excluded".to_owned()))
}

const NOTHING: [&str; 0] = [];
const FAILED: [&str; 2] = ["Repair Fail", "!RepairBrokenPod"];
const MENDED: [&str; 2] = ["Repair Success", "RepairBrokenPod"];

#[test]
fn a_pod_that_is_redirected_in_time_is_neither_labelled_nor_deleted() {
    let (mut desk, web) = (Desk::new("rld"), pod("web", None));
    assert_eq!(desk.look(&web, &failed()), NOTHING);
    assert_eq!(desk.later(WAIT / 2).look(&web, &failed()), NOTHING);
    assert_eq!(desk.look(&web, &Diagnosis::Mended), MENDED);
    // Its container waits for long until it is started again.
    assert_eq!(
        desk.later(WAIT * 10).look(&web, &Diagnosis::Mended),
        NOTHING
    );
    assert_eq!(desk.look(&web, &Diagnosis::Well(true)), NOTHING);
    assert!(!desk.ledger.is_open());
}

#[test]
fn a_container_that_passes_before_anybody_looks_was_repaired_all_the_same() {
    let (mut desk, web) = (Desk::new("r"), pod("web", None));
    assert_eq!(desk.look(&web, &failed()), NOTHING);
    assert_eq!(desk.look(&web, &Diagnosis::Well(true)), MENDED);
    assert_eq!(desk.look(&web, &Diagnosis::Well(true)), NOTHING);
}

#[test]
fn each_kinder_way_is_given_its_time_before_the_next() {
    let (mut desk, bare) = (Desk::new("rld"), pod("web", None));
    assert_eq!(desk.look(&bare, &failed()), NOTHING);
    let due = desk.later(WAIT).look(&bare, &failed());
    assert_eq!(due, [&FAILED[..], &["Label"]].concat());
    assert_eq!(
        desk.did(&bare, Change::Label, &Ok(())),
        ["Label Success", "!LabelBrokenPod"]
    );
    assert_eq!(
        desk.look(&bare, &failed()),
        NOTHING,
        "the watch does not show it yet"
    );
    let labelled = pod("web", Some("true"));
    assert_eq!(desk.look(&labelled, &failed()), NOTHING);
    assert_eq!(
        desk.later(WAIT - Duration::from_millis(1))
            .look(&labelled, &failed()),
        NOTHING
    );
    assert_eq!(
        desk.later(Duration::from_millis(1))
            .look(&labelled, &failed()),
        ["Delete"]
    );
    assert_eq!(
        desk.did(&labelled, Change::Delete, &Ok(())),
        ["Delete Success", "!DeleteBrokenPod"]
    );
    assert_eq!(
        desk.look(&labelled, &failed()),
        NOTHING,
        "the watch does not show it yet"
    );
}

/// The modes, what is wrong, whether it is told, and what is done when time is up.
fn rows() -> Vec<(
    &'static str,
    Diagnosis,
    &'static str,
    &'static [&'static str],
)> {
    // The successor of a pod that pod-events does not work on would fare no better.
    let stranger = || lacks(true, true, false);
    // A pod that runs serves. Without a ztunnel it is often all pods of a node.
    let (no_proxy, no_ztunnel) = (|| lacks(false, true, true), || lacks(false, false, true));
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
    for (modes, diagnosis, told, done) in rows() {
        let (mut desk, web) = (Desk::new(modes), pod("web", None));
        let mut found = desk.look(&web, &diagnosis);
        if found.is_empty() {
            found = desk.later(WAIT).look(&web, &diagnosis);
        }
        let told = [told, "!RepairBrokenPod"]
            .into_iter()
            .filter(|_| !told.is_empty());
        let wanted: Vec<_> = told.chain(done.iter().copied()).collect();
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
        let (mut desk, web) = (Desk::new(modes), pod("web", None));
        let found = desk.look(&web, &diagnosis);
        assert_eq!(!found.is_empty(), at_once, "{modes} {diagnosis:?}");
    }
}

#[test]
fn what_is_told_is_told_once() {
    let (mut desk, web) = (Desk::new("r"), pod("web", None));
    desk.look(&web, &failed());
    assert_eq!(desk.later(WAIT).look(&web, &failed()), FAILED);
    assert_eq!(desk.ledger.amiss(), 1);
    for _ in 0..10 {
        assert_eq!(desk.later(WAIT).look(&web, &failed()), NOTHING);
    }
    assert_eq!(desk.look(&web, &Diagnosis::Mended), MENDED);
    assert_eq!(desk.ledger.amiss(), 0);
    assert_eq!(desk.look(&web, &again()), FAILED, "another failure is news");
}

#[test]
fn a_label_that_was_there_before_is_counted_as_skipped_and_the_next_way_waits_from_now() {
    let (mut desk, web) = (Desk::new("ld"), pod("web", Some("by hand")));
    assert_eq!(desk.look(&web, &failed()), ["Label Skip"]);
    assert_eq!(desk.look(&web, &failed()), NOTHING);
    assert_eq!(desk.later(WAIT).look(&web, &failed()), ["Delete"]);
}

#[test]
fn our_label_goes_when_nothing_is_missing_any_more() {
    let mut desk = Desk::new("rl");
    let ours = Pod {
        broken: None,
        ..pod("web", Some("true"))
    };
    for is_redirected in [true, false] {
        assert_eq!(
            desk.look(&ours, &Diagnosis::Well(is_redirected)),
            ["Unlabel"]
        );
    }
    let refused = Err(ChangeError::Failed("no".to_owned()));
    assert_eq!(desk.did(&ours, Change::Unlabel, &refused), NOTHING);
    assert_eq!(
        desk.look(&ours, &Diagnosis::Well(true)),
        NOTHING,
        "it was refused a moment ago"
    );
    assert_eq!(
        desk.later(WAIT).look(&ours, &Diagnosis::Well(true)),
        ["Unlabel"]
    );
    assert_eq!(desk.look(&ours, &Diagnosis::Unsure), NOTHING);
    assert_eq!(
        desk.look(&pod("web", Some("by hand")), &Diagnosis::Well(true)),
        NOTHING
    );
    assert!(!desk.ledger.is_open());
    assert_eq!(
        Desk::new("rd").look(&ours, &Diagnosis::Well(true)),
        NOTHING,
        "who may not label"
    );
}

#[test]
fn a_change_that_fails_is_told_and_waits_longer_each_time() {
    let (mut desk, web) = (Desk::new("d"), pod("web", None));
    let refused = Err(ChangeError::Failed("the API server answers 403".to_owned()));
    let mut tries = 0;
    for _ in 0..600 {
        if desk.later(Duration::from_secs(1)).look(&web, &failed()) == ["Delete"] {
            tries += 1;
            assert_eq!(
                desk.did(&web, Change::Delete, &refused),
                ["Delete Fail", "!DeleteBrokenPod"]
            );
        }
    }
    // At 0, 5, 15, 35, 75, 155, 315 and 615 seconds from the first.
    assert_eq!(tries, 7);
}

#[test]
fn a_pod_that_has_changed_meanwhile_is_looked_at_again_soon() {
    let (mut desk, web) = (Desk::new("d"), pod("web", None));
    assert_eq!(desk.look(&web, &failed()), ["Delete"]);
    assert_eq!(
        desk.did(&web, Change::Delete, &Err(ChangeError::Changed)),
        ["Delete Skip"]
    );
    assert_eq!(desk.look(&web, &failed()), NOTHING);
    assert_eq!(
        desk.later(LOOK_AGAIN).look(&web, &Diagnosis::Well(true)),
        NOTHING
    );
    assert_eq!(desk.look(&web, &failed()), ["Delete"]);
}

#[test]
fn a_node_changes_no_more_pods_in_a_minute_than_it_may() {
    let mut desk = Desk::limited("d", 3);
    let pods: Vec<_> = (0..50)
        .map(|number| pod(&format!("web-{number}"), None))
        .collect();
    let mut deleted = Vec::new();
    for second in 0..120 {
        for web in &pods {
            if desk.look(web, &failed()) == ["Delete"] {
                desk.did(web, Change::Delete, &Ok(()));
                deleted.push(second);
            }
        }
        desk.later(Duration::from_secs(1));
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
    let (mut desk, web) = (Desk::new("d"), pod("web", None));
    desk.look(&web, &failed());
    let ending = Pod {
        is_ending: true,
        ..web.clone()
    };
    assert_eq!(desk.look(&ending, &failed()), NOTHING);
    assert!(!desk.ledger.is_open());
    desk.look(&web, &failed());
    desk.ledger.keep(|_| false);
    assert!(!desk.ledger.is_open());
}

#[test]
fn while_nothing_can_be_told_nothing_is_done_and_the_time_goes_on() {
    let (mut desk, web) = (Desk::new("rd"), pod("web", None));
    desk.look(&web, &failed());
    assert_eq!(desk.later(WAIT).look(&web, &Diagnosis::Unsure), NOTHING);
    assert_eq!(
        desk.look(&web, &failed()),
        [&FAILED[..], &["Delete"]].concat()
    );
}
