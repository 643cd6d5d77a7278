//! repair at a real API server with exactly the chart's permissions for each action: what it reports, labels, deletes
//! and leaves alone. pod-events is scripted unless the real one is named.

mod away;
mod fake;
mod fixture;
mod real;
mod rights;
mod sidecar;

use std::time::{Duration, Instant};

use anyhow::ensure;
use fixture::{Action, Fixture};
use inpod_proto::{podevents::v1::PodState, types::v1::Enrollment};
use integration::{Act, ApiProxy, Cut, TIMEOUT, Verb, eventually};
use nix::sys::signal::Signal;
use serde_json::json;

fn stays(time: Duration, what: &str, mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + time;
    while Instant::now() < until {
        assert!(is_so(), "{what}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn a_pod_that_is_redirected_in_time_is_told_of_and_left_alone_with_every_way_on() {
    let fixture = Fixture::new(Action::Delete);
    fixture.start(3600, &[]);
    let uid = fixture.broken("web");
    let other = fixture.make("fine", &json!({}));
    fixture
        .said
        .report(&other, Enrollment::Sidecar, PodState::Enrolled, 0);
    stays(Duration::from_secs(2), "nothing is told yet", || {
        fixture.pods("repair", "fail") == 0
    });
    // Since a time after the failed run.
    fixture
        .said
        .report(&uid, Enrollment::Sidecar, PodState::Enrolled, 2_000_000_000);
    fixture.until_counted("repair", "success", 1);
    let note = fixture.event("web", "RepairBrokenPod", "Normal");
    assert!(note.contains("redirected now"), "{note}");
    fixture.pass("web");
    stays(Duration::from_secs(1), "it is left alone", || {
        fixture.is_there("web") && fixture.pods("repair", "success") == 1
    });
}

#[test]
fn a_pod_that_stays_without_redirection_is_reported_once_and_left_where_nothing_else_is_on() {
    let fixture = Fixture::new(Action::Repair);
    fixture.start(1, &[]);
    fixture.broken("web");
    fixture.until_counted("repair", "fail", 1);
    let note = fixture.event("web", "RepairBrokenPod", "Warning");
    assert!(note.contains("nf_tables is missing"), "{note}");
    stays(Duration::from_secs(3), "once", || {
        fixture.pods("repair", "fail") == 1 && fixture.is_there("web")
    });
    assert_eq!(fixture.counted("inpod_repair_pods_amiss"), 1);
    // It has no permission for more: a mistaken attempt is refused and reported.
    fixture.node.stop("repair", Signal::SIGTERM).unwrap();
    fixture.start(0, &["--delete-pods", "true"]);
    fixture.until_counted("delete", "fail", 1);
    let note = fixture.event("web", "DeleteBrokenPod", "Warning");
    assert!(note.contains("403") && fixture.is_there("web"), "{note}");
}

#[test]
fn an_event_that_the_server_does_not_take_at_once_is_made_all_the_same() {
    let fixture = Fixture::new(Action::Repair);
    let proxy = ApiProxy::start(fixture.node.netns(), &fixture.node.kubeconfig()).unwrap();
    proxy.fault(Verb::Create, "events", 2, Act::Refuse(500, None));
    fixture.start(1, &[]);
    fixture.broken("web");
    fixture.event("web", "RepairBrokenPod", "Warning");
    assert_eq!(proxy.asked(Verb::Create, "events").len(), 3);
}

#[test]
fn a_pod_that_stays_so_is_labelled_and_loses_the_label_when_it_is_redirected() {
    let fixture = Fixture::new(Action::Label);
    fixture.start(1, &[]);
    let uid = fixture.broken("web");
    fixture.until_labelled("web", Some("true"));
    fixture.until_counted("label", "success", 1);
    assert!(
        fixture
            .event("web", "LabelBrokenPod", "Warning")
            .contains("nf_tables is missing")
    );
    fixture
        .said
        .report(&uid, Enrollment::Sidecar, PodState::Enrolled, 2_000_000_000);
    fixture.until_counted("repair", "success", 1);
    fixture.pass("web");
    fixture.until_labelled("web", None);
    assert!(fixture.is_there("web"));
}

#[test]
fn a_pod_that_nobody_redirects_is_labelled_under_names_of_ones_own_and_never_deleted() {
    let fixture = Fixture::new(Action::Label);
    let uid = fixture.make("web", &json!({}));
    fixture
        .said
        .report(&uid, Enrollment::None, PodState::Out, 0);
    fixture.fail("web", 126);
    fixture.start(3600, &[]);
    fixture.until_labelled("web", Some("true"));
    fixture.until_counted("repair", "skip", 1);
    assert!(
        fixture
            .event("web", "RepairBrokenPod", "Warning")
            .contains("NAMESPACE_EXCLUDED")
    );
    let fixture = Fixture::new(Action::Delete);
    let uid = fixture.make("web", &json!({}));
    fixture
        .said
        .report(&uid, Enrollment::None, PodState::Out, 0);
    fixture.fail("web", 126);
    fixture.start(0, &["--repair-pods", "false"]);
    stays(
        Duration::from_secs(3),
        "its successor would be no better",
        || fixture.is_there("web"),
    );
}

#[test]
fn a_pod_whose_redirection_does_not_come_is_deleted_and_others_are_not() {
    let fixture = Fixture::new(Action::Delete);
    for name in ["passed", "other-code", "far", "runs"] {
        let node = if name == "far" {
            "another-node"
        } else {
            fixture.node.name()
        };
        let uid = fixture.make_on(node, name, &json!({}));
        fixture
            .said
            .report(&uid, Enrollment::Sidecar, PodState::Out, 0);
    }
    fixture.pass("passed");
    fixture.fail("other-code", 1);
    fixture.fail("far", 126);
    fixture.broken("web");
    fixture.start(1, &[]);
    fixture.until_gone("web");
    fixture.until_counted("delete", "success", 1);
    assert!(
        fixture
            .event("web", "DeleteBrokenPod", "Warning")
            .contains("nf_tables is missing")
    );
    let others = ["passed", "other-code", "far", "runs"];
    stays(Duration::from_secs(3), "others stay", || {
        others.iter().all(|name| fixture.is_there(name))
    });
}

#[test]
fn a_pod_that_has_failed_again_although_it_is_redirected_is_deleted_without_a_wait() {
    let fixture = Fixture::new(Action::Delete);
    let uid = fixture.make("web", &json!({}));
    fixture
        .said
        .report(&uid, Enrollment::Sidecar, PodState::Enrolled, 100);
    fixture.fail("web", 126);
    fixture.start(3600, &[]);
    fixture.until_gone("web");
    assert!(
        fixture
            .event("web", "RepairBrokenPod", "Warning")
            .contains("failed again")
    );
}

#[test]
fn a_pod_that_has_changed_since_it_was_seen_survives() {
    let fixture = Fixture::new(Action::Delete);
    let proxy = ApiProxy::start(fixture.node.netns(), &fixture.node.kubeconfig()).unwrap();
    // Listed as broken, then its container passes unseen by a watch.
    proxy.fault(Verb::Watch, "pods", 1000, Act::Swallow);
    fixture.broken("web");
    fixture.start(5, &[]);
    fixture.pass("web");
    eventually("its deletion was asked for", TIMEOUT, || {
        ensure!(fixture.pods("delete", "skip") > 0, "not yet");
        anyhow::Ok(())
    })
    .unwrap();
    assert!(fixture.is_there("web"));
    assert_eq!(fixture.pods("delete", "success"), 0);
}

#[test]
fn a_watch_that_broke_is_heard_of_again_where_no_pod_changes() {
    let fixture = Fixture::new(Action::Repair);
    let proxy = ApiProxy::start(fixture.node.netns(), &fixture.node.kubeconfig()).unwrap();
    fixture.start(5, &[]);
    let listed = proxy.asked(Verb::List, "pods").len();
    eventually("a watch is open", TIMEOUT, || {
        ensure!(proxy.open_watches() > 0, "not yet");
        anyhow::Ok(())
    })
    .unwrap();
    proxy.fault(Verb::Watch, "pods", 1, Act::Refuse(500, None));
    proxy.cut(Cut::Broken);
    eventually(
        "the pods are listed again, and repair is ready",
        TIMEOUT,
        || {
            let again = proxy.asked(Verb::List, "pods").len() - listed;
            ensure!(again > 0, "they are not listed");
            ensure!(
                fixture.counted("inpod_repair_ready") == 1,
                "it is not ready"
            );
            anyhow::Ok(())
        },
    )
    .unwrap();
}

#[test]
fn no_more_pods_are_deleted_in_a_minute_than_the_node_may() {
    let fixture = Fixture::new(Action::Delete);
    let names: Vec<_> = (0..6).map(|number| format!("web-{number}")).collect();
    names.iter().for_each(|name| drop(fixture.broken(name)));
    fixture.start(0, &["--changes-per-minute", "2"]);
    let left = || names.iter().filter(|name| fixture.is_there(name)).count();
    eventually("two are deleted", TIMEOUT, || {
        ensure!(left() == 4, "{} are left", left());
        anyhow::Ok(())
    })
    .unwrap();
    stays(Duration::from_secs(10), "the others wait", || left() == 4);
}

#[test]
fn only_pods_that_are_selected_are_considered() {
    let fixture = Fixture::new(Action::Delete);
    fixture.broken("out");
    let uid = fixture.make("in", &json!({"team": "a"}));
    fixture
        .said
        .report(&uid, Enrollment::Sidecar, PodState::Out, 0);
    fixture.fail("in", 126);
    fixture.start(
        0,
        &[
            "--label-selectors",
            "team in (a,b)",
            "--field-selectors",
            "metadata.name!=other",
        ],
    );
    fixture.until_gone("in");
    stays(Duration::from_secs(2), "it is not selected", || {
        fixture.is_there("out")
    });
}

#[test]
fn a_restart_forgets_how_long_and_nothing_else_and_a_killed_one_is_followed_by_the_next() {
    let fixture = Fixture::new(Action::Label);
    fixture.broken("web");
    fixture.start(3600, &[]);
    fixture.node.stop("repair", Signal::SIGKILL).unwrap();
    fixture.start(1, &[]);
    fixture.until_labelled("web", Some("true"));
    fixture.node.stop("repair", Signal::SIGTERM).unwrap();
    fixture.start(1, &[]);
    fixture.until_counted("label", "skip", 1);
    assert_eq!(fixture.pods("label", "success"), 0);
    fixture.pass("web");
    let uid = fixture.pod("web").unwrap()["metadata"]["uid"]
        .as_str()
        .unwrap()
        .to_owned();
    fixture
        .said
        .report(&uid, Enrollment::Sidecar, PodState::Enrolled, 2_000_000_000);
    fixture.until_labelled("web", None);
}

#[test]
fn while_pod_events_is_away_nothing_is_deleted_and_afterwards_it_is() {
    let fixture = Fixture::new(Action::Delete);
    fixture.start(0, &[]);
    let Fixture { said, .. } = &fixture;
    // It does not know the pod: no better.
    let uid = fixture.make("web", &json!({}));
    fixture.fail("web", 126);
    stays(Duration::from_secs(3), "who knows", || {
        fixture.is_there("web")
    });
    fixture.until_counted("repair", "fail", 1);
    said.report(&uid, Enrollment::Sidecar, PodState::Out, 0);
    fixture.until_gone("web");
}
