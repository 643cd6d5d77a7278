//! repair against a real API server, with exactly the rights that the chart gives to each of its ways: what it tells,
//! labels, deletes and leaves. What pod-events says is a test's word, but where the real one is meant.
#![cfg(feature = "apiserver")]
#![expect(clippy::unwrap_used, reason = "a test that fails panics")]

#[path = "../cluster/mod.rs"]
mod cluster;
mod desk;
mod fake;
mod real;
mod rights;
mod sidecar;

use std::time::{Duration, Instant};

use anyhow::ensure;
use desk::{Desk, Way};
use inpod_proto::{podevents::v1::PodState, types::v1::Enrollment};
use integration::{Act, ApiProxy, Cut, PATIENCE, Verb, eventually};
use nix::sys::signal::Signal;
use serde_json::json;

/// Looks for so long whether something stays so.
fn stays(time: Duration, what: &str, mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + time;
    while Instant::now() < until {
        assert!(is_so(), "{what}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn a_pod_that_is_redirected_in_time_is_told_of_and_left_alone_with_every_way_on() {
    let desk = Desk::new(Way::Delete);
    desk.start(3600, &[]);
    let uid = desk.broken("web");
    let other = desk.make("fine", &json!({}));
    desk.said
        .say(&other, Enrollment::Sidecar, PodState::Enrolled, 0);
    stays(Duration::from_secs(2), "nothing is told yet", || {
        desk.pods("repair", "fail") == 0
    });
    // Since after the run that failed.
    desk.said
        .say(&uid, Enrollment::Sidecar, PodState::Enrolled, 2_000_000_000);
    desk.until_counted("repair", "success", 1);
    let note = desk.event("web", "RepairBrokenPod", "Normal");
    assert!(note.contains("redirected now"), "{note}");
    desk.pass("web");
    stays(Duration::from_secs(1), "it is left alone", || {
        desk.is_there("web") && desk.pods("repair", "success") == 1
    });
}

#[test]
fn a_pod_that_stays_without_redirection_is_told_of_once_and_left_where_nothing_else_is_on() {
    let desk = Desk::new(Way::Repair);
    desk.start(1, &[]);
    desk.broken("web");
    desk.until_counted("repair", "fail", 1);
    let note = desk.event("web", "RepairBrokenPod", "Warning");
    assert!(note.contains("nf_tables is missing"), "{note}");
    stays(Duration::from_secs(3), "once", || {
        desk.pods("repair", "fail") == 1 && desk.is_there("web")
    });
    assert_eq!(desk.counted("inpod_repair_pods_amiss"), 1);
    // It has no right to more: asked for it by mistake, it is refused and says so.
    desk.node.stop("repair", Signal::SIGTERM).unwrap();
    desk.start(0, &["--delete-pods", "true"]);
    desk.until_counted("delete", "fail", 1);
    let note = desk.event("web", "DeleteBrokenPod", "Warning");
    assert!(note.contains("403") && desk.is_there("web"), "{note}");
}

#[test]
fn an_event_that_the_server_does_not_take_at_once_is_made_all_the_same() {
    let desk = Desk::new(Way::Repair);
    let proxy = ApiProxy::start(desk.node.netns(), &desk.node.kubeconfig()).unwrap();
    proxy.fault(Verb::Create, "events", 2, Act::Refuse(500, None));
    desk.start(1, &[]);
    desk.broken("web");
    desk.event("web", "RepairBrokenPod", "Warning");
    assert_eq!(proxy.asked(Verb::Create, "events").len(), 3);
}

#[test]
fn a_pod_that_stays_so_is_labelled_and_loses_the_label_when_it_is_redirected() {
    let desk = Desk::new(Way::Label);
    desk.start(1, &[]);
    let uid = desk.broken("web");
    desk.until_labelled("web", Some("true"));
    desk.until_counted("label", "success", 1);
    assert!(
        desk.event("web", "LabelBrokenPod", "Warning")
            .contains("nf_tables is missing")
    );
    desk.said
        .say(&uid, Enrollment::Sidecar, PodState::Enrolled, 2_000_000_000);
    desk.until_counted("repair", "success", 1);
    desk.pass("web");
    desk.until_labelled("web", None);
    assert!(desk.is_there("web"));
}

#[test]
fn a_pod_that_nobody_redirects_is_labelled_under_names_of_ones_own_and_never_deleted() {
    let desk = Desk::new(Way::Label);
    let uid = desk.make("web", &json!({}));
    desk.said.say(&uid, Enrollment::None, PodState::Out, 0);
    desk.fail("web", 126);
    desk.start(3600, &[]);
    desk.until_labelled("web", Some("true"));
    desk.until_counted("repair", "skip", 1);
    assert!(
        desk.event("web", "RepairBrokenPod", "Warning")
            .contains("NAMESPACE_EXCLUDED")
    );
    let desk = Desk::new(Way::Delete);
    let uid = desk.make("web", &json!({}));
    desk.said.say(&uid, Enrollment::None, PodState::Out, 0);
    desk.fail("web", 126);
    desk.start(0, &["--repair-pods", "false"]);
    stays(
        Duration::from_secs(3),
        "its successor would be no better",
        || desk.is_there("web"),
    );
}

#[test]
fn a_pod_whose_redirection_does_not_come_is_deleted_and_others_are_not() {
    let desk = Desk::new(Way::Delete);
    for name in ["passed", "other-code", "far", "runs"] {
        let node = if name == "far" {
            "another-node"
        } else {
            desk.node.name()
        };
        let uid = desk.make_on(node, name, &json!({}));
        desk.said.say(&uid, Enrollment::Sidecar, PodState::Out, 0);
    }
    desk.pass("passed");
    desk.fail("other-code", 1);
    desk.fail("far", 126);
    desk.broken("web");
    desk.start(1, &[]);
    desk.until_gone("web");
    desk.until_counted("delete", "success", 1);
    assert!(
        desk.event("web", "DeleteBrokenPod", "Warning")
            .contains("nf_tables is missing")
    );
    let others = ["passed", "other-code", "far", "runs"];
    stays(Duration::from_secs(3), "others stay", || {
        others.iter().all(|name| desk.is_there(name))
    });
}

#[test]
fn a_pod_that_has_failed_again_although_it_is_redirected_is_deleted_without_a_wait() {
    let desk = Desk::new(Way::Delete);
    let uid = desk.make("web", &json!({}));
    desk.said
        .say(&uid, Enrollment::Sidecar, PodState::Enrolled, 100);
    desk.fail("web", 126);
    desk.start(3600, &[]);
    desk.until_gone("web");
    assert!(
        desk.event("web", "RepairBrokenPod", "Warning")
            .contains("failed again")
    );
}

#[test]
fn a_pod_that_has_changed_since_it_was_seen_survives() {
    let desk = Desk::new(Way::Delete);
    let proxy = ApiProxy::start(desk.node.netns(), &desk.node.kubeconfig()).unwrap();
    // It is listed as broken; then its container passes, and no watch says so.
    proxy.fault(Verb::Watch, "pods", 1000, Act::Swallow);
    desk.broken("web");
    desk.start(5, &[]);
    desk.pass("web");
    eventually("its deletion was asked for", PATIENCE, || {
        ensure!(desk.pods("delete", "skip") > 0, "not yet");
        anyhow::Ok(())
    })
    .unwrap();
    assert!(desk.is_there("web"));
    assert_eq!(desk.pods("delete", "success"), 0);
}

#[test]
fn a_watch_that_broke_is_heard_of_again_where_no_pod_changes() {
    let desk = Desk::new(Way::Repair);
    let proxy = ApiProxy::start(desk.node.netns(), &desk.node.kubeconfig()).unwrap();
    desk.start(5, &[]);
    let listed = proxy.asked(Verb::List, "pods").len();
    eventually("a watch is open", PATIENCE, || {
        ensure!(proxy.open_watches() > 0, "not yet");
        anyhow::Ok(())
    })
    .unwrap();
    proxy.fault(Verb::Watch, "pods", 1, Act::Refuse(500, None));
    proxy.cut(Cut::Broken);
    eventually(
        "the pods are listed again, and repair is ready",
        PATIENCE,
        || {
            let again = proxy.asked(Verb::List, "pods").len() - listed;
            ensure!(again > 0, "they are not listed");
            ensure!(desk.counted("inpod_repair_ready") == 1, "it is not ready");
            anyhow::Ok(())
        },
    )
    .unwrap();
}

#[test]
fn no_more_pods_are_deleted_in_a_minute_than_the_node_may() {
    let desk = Desk::new(Way::Delete);
    let names: Vec<_> = (0..6).map(|number| format!("web-{number}")).collect();
    names.iter().for_each(|name| drop(desk.broken(name)));
    desk.start(0, &["--changes-per-minute", "2"]);
    let left = || names.iter().filter(|name| desk.is_there(name)).count();
    eventually("two are deleted", PATIENCE, || {
        ensure!(left() == 4, "{} are left", left());
        anyhow::Ok(())
    })
    .unwrap();
    stays(Duration::from_secs(10), "the others wait", || left() == 4);
}

#[test]
fn only_pods_that_are_selected_are_looked_at() {
    let desk = Desk::new(Way::Delete);
    desk.broken("out");
    let uid = desk.make("in", &json!({"team": "a"}));
    desk.said.say(&uid, Enrollment::Sidecar, PodState::Out, 0);
    desk.fail("in", 126);
    desk.start(
        0,
        &[
            "--label-selectors",
            "team in (a,b)",
            "--field-selectors",
            "metadata.name!=other",
        ],
    );
    desk.until_gone("in");
    stays(Duration::from_secs(2), "it is not selected", || {
        desk.is_there("out")
    });
}

#[test]
fn a_restart_forgets_how_long_and_nothing_else_and_a_killed_one_is_followed_by_the_next() {
    let desk = Desk::new(Way::Label);
    desk.broken("web");
    desk.start(3600, &[]);
    desk.node.stop("repair", Signal::SIGKILL).unwrap();
    desk.start(1, &[]);
    desk.until_labelled("web", Some("true"));
    desk.node.stop("repair", Signal::SIGTERM).unwrap();
    desk.start(1, &[]);
    desk.until_counted("label", "skip", 1);
    assert_eq!(desk.pods("label", "success"), 0);
    desk.pass("web");
    let uid = desk.pod("web").unwrap()["metadata"]["uid"]
        .as_str()
        .unwrap()
        .to_owned();
    desk.said
        .say(&uid, Enrollment::Sidecar, PodState::Enrolled, 2_000_000_000);
    desk.until_labelled("web", None);
}

#[test]
fn while_pod_events_is_away_nothing_is_deleted_and_afterwards_it_is() {
    let desk = Desk::new(Way::Delete);
    desk.start(0, &[]);
    let Desk { said, .. } = &desk;
    // It does not know the pod, which is no better.
    let uid = desk.make("web", &json!({}));
    desk.fail("web", 126);
    stays(Duration::from_secs(3), "who knows", || desk.is_there("web"));
    desk.until_counted("repair", "fail", 1);
    said.say(&uid, Enrollment::Sidecar, PodState::Out, 0);
    desk.until_gone("web");
}
