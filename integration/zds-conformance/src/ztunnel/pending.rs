//! Cases about pods that cannot be served.

use std::{thread, time::Duration};

use super::bench::{Bench, QUIET, dev_null};
use crate::{
    case::{Case, Outcome, check},
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
        name: "unwanted-pods-are-not-retried",
        about: "A pod that failed and was deleted, or whose connection ended, is not started later.",
        rules: &["Z13", "Z15"],
        run: unwanted_pods_are_not_retried,
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

fn unwanted_pods_are_not_retried(bench: &mut Bench) -> Outcome {
    let (session, deleted, forgotten) = (bench.live()?, bench.pod()?, bench.pod()?);
    let taken = (deleted.take_hbone_port()?, forgotten.take_hbone_port()?);
    session.add_fails("deleted", &deleted)?;
    session.ok(wire::del("deleted"))?;
    session.add_fails("forgotten", &forgotten)?;
    drop(session);
    let session = bench.reconnected()?;
    session.ok(wire::snapshot_sent())?;
    drop(taken);
    thread::sleep(RETRIED);
    let (first, second) = (deleted.ports()?, forgotten.ports()?);
    check(
        first.is_empty(),
        "no listeners in a pod that failed and was deleted",
        || format!("{first:?}"),
    )?;
    check(
        second.is_empty(),
        "no listeners in a pod of an earlier connection",
        || format!("{second:?}"),
    )
}
