//! The client dies, its deadline expires, or a service is killed, at each step of ADD and DEL: afterwards the pod is
//! completely enrolled or completely withdrawn, and a repeated call succeeds.
//!
//! Calls between the processes pass a proxy (`integration::Proxy`) that holds them.

mod bench;

use std::{fs, path::PathBuf, thread};

use inpod_proto::{podevents::v1::PodState, types::v1::Reason};
use integration::{Call, Moment, Spec, Step};
use nix::sys::signal::Signal;

use bench::{Bench, Event, FinalState, To};

// scenario: 50
#[test]
fn whenever_the_plugin_is_killed_the_pod_is_wholly_in_or_out_and_a_repetition_succeeds() {
    let bench = Bench::new().unwrap();
    bench.at_each_step(Event::PluginKilled).unwrap();
}

#[test]
fn whenever_the_deadline_passes_the_pod_is_wholly_in_or_out_and_a_repetition_succeeds() {
    let bench = Bench::new().unwrap();
    bench.at_each_step(Event::DeadlinePassed).unwrap();
}

// scenario: 50
#[test]
fn whenever_pod_events_is_killed_the_pod_is_wholly_in_or_out_and_a_repetition_succeeds() {
    let bench = Bench::new().unwrap();
    bench.at_each_step(Event::Killed("pod-events")).unwrap();
}

// scenario: 50
#[test]
fn whenever_netconfig_is_killed_the_pod_is_wholly_in_or_out_and_a_repetition_succeeds() {
    let bench = Bench::new().unwrap();
    bench.at_each_step(Event::Killed("netconfig")).unwrap();
}

// scenario: 50
#[test]
fn whenever_the_broker_is_killed_the_pod_is_wholly_in_or_out_and_a_repetition_succeeds() {
    let bench = Bench::new().unwrap();
    bench.at_each_step(Event::Killed("ztunnel-broker")).unwrap();
}

// scenario: 50
#[test]
fn whenever_ztunnel_is_killed_the_pod_is_wholly_in_or_out_and_a_repetition_succeeds() {
    let bench = Bench::new().unwrap();
    bench.at_each_step(Event::Killed("ztunnel")).unwrap();
}

#[test]
fn whatever_is_killed_a_pod_with_a_sidecar_is_wholly_in_or_out_and_a_repetition_succeeds() {
    let bench = Bench::of(To::Sidecar).unwrap();
    for event in [
        Event::PluginKilled,
        Event::DeadlinePassed,
        Event::Killed("pod-events"),
        Event::Killed("netconfig"),
    ] {
        bench.at_each_step(event).unwrap();
    }
}

/// netconfig has applied the rules, pod-events has not recorded it.
#[test]
fn rules_to_a_sidecar_that_were_applied_when_pod_events_was_killed_are_there_again_and_reported() {
    let bench = Bench::of(To::Sidecar).unwrap();
    let (pod, step) = (
        bench.sandbox().unwrap(),
        Step {
            method: "ApplyRules",
            moment: Moment::After,
        },
    );
    // The kernel's handles change when rules are rewritten.
    let rules = || pod.exec(&["nft", "-s", "-a", "list", "ruleset"]).unwrap();
    let held = bench.proxy.hold(step);
    let call = bench.call(Call::add, &pod);
    let running = call.start().unwrap();
    held.reached().unwrap();
    let before = rules();
    assert!(before.contains("15006"), "{before}");
    let [written]: [PathBuf; 1] = bench.checkpoint().unwrap().try_into().unwrap();
    let written = fs::read_to_string(&written).unwrap();
    assert!(!written.contains("fingerprint"), "{written}");
    bench.node.stop("pod-events", Signal::SIGKILL).unwrap();
    held.release();
    // Without its plugin the call is not repeated.
    drop(running.kill());
    bench.start("pod-events").unwrap();
    bench.until_final(&pod, &[FinalState::In]).unwrap();
    // An ADD that was not answered may have been undone first.
    let after = rules();
    let known = bench.node.explain(&pod.spec).unwrap();
    assert_eq!(known.reason(), Reason::SidecarInjected);
    assert!(known.last_failure.is_none(), "{known:?}");
    assert!(known.drift.iter().all(|drift| drift.count == 0));
    assert!(!known.rules.unwrap().fingerprint.is_empty());
    bench.repeat(&call).unwrap();
    assert_eq!(rules(), after, "written without need");
    bench.until_final(&pod, &[FinalState::In]).unwrap();
}

/// Negative control: holding a call must not itself interrupt it.
#[test]
fn a_call_that_is_only_held_for_a_moment_succeeds() {
    let bench = Bench::new().unwrap();
    let pod = bench.node.sandbox(Spec::new("a").ambient()).unwrap();
    let held = bench.proxy.hold(Step {
        method: "ApplyRules",
        moment: Moment::After,
    });
    let call = bench.call(Call::add, &pod);
    let adding = thread::spawn(move || call.run());
    held.reached().unwrap();
    assert_eq!(
        bench.node.explain(&pod.spec).unwrap().state(),
        PodState::Enrolling
    );
    held.release();
    let outcome = adding.join().unwrap().unwrap();
    assert_eq!(outcome.code, 0, "{outcome:?}");
    bench.until_final(&pod, &[FinalState::In]).unwrap();
}
