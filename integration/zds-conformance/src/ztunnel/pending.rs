//! Cases about pods that cannot be served.

use std::{thread, time::Duration};

use super::bench::{Bench, QUIET, dev_null};
use crate::{
    case::{Case, Outcome, check},
    netns::Netns,
    wire,
};

pub(super) const CASES: &[Case<Bench>] = &[
    Case {
        name: "start-failure",
        about: "A pod whose port is taken is refused as a start failure; the connection stays and others are served.",
        rules: &["Z15"],
        run: start_failure,
    },
    Case {
        name: "start-failure-in-the-snapshot",
        about: "A pod that cannot be served holds up neither the rest of the snapshot nor its end.",
        rules: &["Z15"],
        run: start_failure_in_the_snapshot,
    },
    Case {
        name: "no-netns",
        about: "A descriptor that is no network namespace is a start failure.",
        rules: &["Z15"],
        run: no_netns,
    },
    Case {
        name: "start-failure-is-taken-back",
        about: "After Del the pod can be added anew, and is served once its port is free.",
        rules: &["Z15"],
        run: start_failure_is_taken_back,
    },
    Case {
        name: "pending-pod-is-added-again",
        about: "A second Add of a pod that failed is a new attempt.",
        rules: &["Z15"],
        run: pending_pod_is_added_again,
    },
    Case {
        name: "deleted-pod-is-not-retried",
        about: "A pod that failed and was deleted is not started later.",
        rules: &["Z15"],
        run: deleted_pod_is_not_retried,
    },
    Case {
        name: "forgotten-pod-is-not-retried",
        about: "A pod that failed on an earlier connection is not started later.",
        rules: &["Z13", "Z15"],
        run: forgotten_pod_is_not_retried,
    },
];

/// The time for a retry; stock ztunnel retries after 5 s.
const RETRIED: Duration = Duration::from_secs(6);

fn start_failure(bench: &mut Bench) -> Outcome {
    let (session, bad, good) = (bench.live()?, bench.pod()?, bench.pod()?);
    let taken = bad.take_hbone_port()?;
    session.add_fails("bad", &bad)?;
    session.silent(QUIET)?;
    let ports = bad.await_ports(&[15008], bench.deadline())?;
    check(
        ports == [15008],
        "all listeners or none: 15008 alone, which is the test's own",
        || format!("{ports:?}"),
    )?;
    session.add("good", &good)?;
    bench.served(&good, "while another one cannot be served")?;
    session.ok(wire::del("good"))?;
    drop(taken);
    bench.unserved(&good, "after Del, while another one cannot be served")
}

fn start_failure_in_the_snapshot(bench: &mut Bench) -> Outcome {
    let (session, bad, good) = (bench.greeted()?, bench.pod()?, bench.pod()?);
    let _taken = bad.take_hbone_port()?;
    session.add_fails("bad", &bad)?;
    session.add("good", &good)?;
    session.ok(wire::snapshot_sent())?;
    bench
        .served(&good, "after a snapshot in which another one failed")
        .map(drop)
}

fn no_netns(bench: &mut Bench) -> Outcome {
    let (session, pod) = (bench.live()?, bench.pod()?);
    let file = dev_null()?;
    let answer = session.ask(wire::add("a"), &[std::os::fd::AsFd::as_fd(&file)])?;
    answer.refused("failure to start proxy", "an Add of /dev/null")?;
    session.ok(wire::del("a"))?;
    session.add("a", &pod)?;
    bench
        .served(&pod, "after an Add of /dev/null was taken back")
        .map(drop)
}

fn start_failure_is_taken_back(bench: &mut Bench) -> Outcome {
    let (session, pod) = (bench.live()?, bench.pod()?);
    let taken = pod.take_hbone_port()?;
    session.add_fails("a", &pod)?;
    session.ok(wire::del("a"))?;
    session.add_fails("a", &pod)?;
    session.ok(wire::del("a"))?;
    drop(taken);
    session.add("a", &pod)?;
    bench.served(&pod, "whose port is free again").map(drop)
}

fn pending_pod_is_added_again(bench: &mut Bench) -> Outcome {
    let (session, pod) = (bench.live()?, bench.pod()?);
    let taken = pod.take_hbone_port()?;
    session.add_fails("a", &pod)?;
    drop(taken);
    session.add("a", &pod)?;
    bench
        .served(&pod, "with the acknowledgement of its second Add")
        .map(drop)
}

fn deleted_pod_is_not_retried(bench: &mut Bench) -> Outcome {
    let (session, pod) = (bench.live()?, bench.pod()?);
    let taken = pod.take_hbone_port()?;
    session.add_fails("deleted", &pod)?;
    session.ok(wire::del("deleted"))?;
    drop(taken);
    not_retried(&pod, "that failed and was deleted")
}

fn forgotten_pod_is_not_retried(bench: &mut Bench) -> Outcome {
    let (session, pod) = (bench.live()?, bench.pod()?);
    let taken = pod.take_hbone_port()?;
    session.add_fails("forgotten", &pod)?;
    drop(session);
    let session = bench.reconnected()?;
    session.ok(wire::snapshot_sent())?;
    drop(taken);
    not_retried(&pod, "of an earlier connection")
}

fn not_retried(pod: &Netns, which: &str) -> Outcome {
    thread::sleep(RETRIED);
    let ports = pod.ports()?;
    let expected = format!("no listeners in a pod {which}");
    check(ports.is_empty(), &expected, || format!("{ports:?}"))
}
