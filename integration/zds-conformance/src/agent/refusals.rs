//! Cases about requests refused by the ztunnel.

use std::{collections::BTreeSet, time::Duration};

use super::{
    bench::{Bench, QUIET},
    peer::Peer,
};
use crate::case::{Case, Outcome, check, failed};

pub(super) const CASES: &[Case<Bench>] = &[
    Case {
        name: "start-failure",
        about: "A pod that ztunnel cannot start is no success, is taken back with Del, and others are served.",
        rules: &["A15"],
        run: start_failure,
    },
    Case {
        name: "start-failure-in-the-snapshot",
        about: "A pod that cannot be started holds up neither the snapshot nor its end, is taken back, and tried again.",
        rules: &["A8", "A15"],
        run: start_failure_in_the_snapshot,
    },
    Case {
        name: "read-error",
        about: "A read error is no success, and the next session is told everything.",
        rules: &["A10", "A16"],
        run: |bench| {
            error_of_the_connection(
                bench,
                "failure to read message : received truncated message",
            )
        },
    },
    Case {
        name: "protocol-error",
        about: "A protocol error is no success, and the next session is told everything.",
        rules: &["A10", "A16"],
        run: |bench| {
            error_of_the_connection(
                bench,
                "failure to process message : ProtocolError(\"conformance\")",
            )
        },
    },
    Case {
        name: "refusal-of-1500-bytes",
        about: "A refusal with a stack trace, longer than 1024 bytes, is read whole and is a refusal like any other.",
        rules: &["A14", "A15"],
        run: |bench| long_refusal(bench, 1500),
    },
    Case {
        name: "refusal-of-60000-bytes",
        about: "A refusal of 60 KB is read whole and is a refusal like any other.",
        rules: &["A14", "A15"],
        run: |bench| long_refusal(bench, 60_000),
    },
];

const START: &str = "failure to start proxy : conformance";

/// Returns the longest time before an agent retries a refused pod.
fn retry(bench: &Bench) -> Duration {
    bench.deadline().saturating_mul(3)
}

/// Refuses a live pod; the Del must follow on the same connection.
fn refused(bench: &Bench, ztunnel: &Peer, error: &str) -> Outcome {
    let bad = bench.pod("bad")?;
    let adding = bench.add(&bad);
    ztunnel.next()?.adds("bad", &bad.netns)?;
    ztunnel.nack(error)?;
    ztunnel.ack_next()?.is("Del bad")?;
    bench.not_credited(&adding, QUIET, "that was refused")?;
    bench.remove("bad")
}

fn start_failure(bench: &mut Bench) -> Outcome {
    let (ztunnel, good) = (bench.live()?, bench.pod("good")?);
    refused(bench, &ztunnel, START)?;
    let adding = bench.add(&good);
    ztunnel.ack_next()?.adds("good", &good.netns)?;
    bench.succeeds(&adding, "good")
}

fn long_refusal(bench: &mut Bench, bytes: usize) -> Outcome {
    let (ztunnel, good) = (bench.live()?, bench.pod("good")?);
    let error = format!("failure to start proxy : {}", "x".repeat(bytes));
    refused(bench, &ztunnel, &error)?;
    let adding = bench.add(&good);
    ztunnel.ack_next()?.adds("good", &good.netns)?;
    bench.succeeds(&adding, "good")
}

fn start_failure_in_the_snapshot(bench: &mut Bench) -> Outcome {
    let pods = bench.pods(3)?;
    bench.seeded(&pods)?;
    let ztunnel = bench.ztunnel()?;
    let first = ztunnel.next()?;
    let uid = first.uid().unwrap_or_default().to_owned();
    check(
        pods.iter().any(|pod| pod.workload.uid == uid),
        "an Add of a pod of the set",
        || first.describe(),
    )?;
    ztunnel.nack(START)?;
    let mut request = BTreeSet::new();
    // The Del, two Adds and the end of the snapshot follow in any order; the refused pod may be among the Adds.
    while request.len() < 4 {
        let next = ztunnel.next()?;
        let again = next.describe() == format!("Add {uid}");
        if again && !request.contains(&format!("Del {uid}")) {
            return failed(
                format!("Del {uid} before it is added again"),
                format!("{request:?}"),
            );
        }
        if again {
            ztunnel.nack(START)?;
            ztunnel.ack_next()?.is(&format!("Del {uid}"))?;
        } else {
            request.insert(next.describe());
            ztunnel.ack()?;
        }
    }
    let complete = request.contains("SnapshotSent") && request.contains(&format!("Del {uid}"));
    check(
        complete,
        "a Del of the refused pod, two Adds and SnapshotSent",
        || format!("{request:?}"),
    )?;
    ztunnel
        .next_within(retry(bench))?
        .is(&format!("Add {uid}"))?;
    ztunnel.ack()?;
    ztunnel.silent(QUIET)
}

fn error_of_the_connection(bench: &mut Bench, error: &str) -> Outcome {
    let (ztunnel, pod) = (bench.live()?, bench.pod("p0")?);
    let adding = bench.add(&pod);
    ztunnel.next()?.adds("p0", &pod.netns)?;
    ztunnel.nack(error)?;
    bench.not_credited(&adding, QUIET, "that was refused")?;
    // Stock ztunnel closes the connection after its own error, too.
    drop(ztunnel);
    bench.seed([&pod])?;
    let all = [pod.workload.uid].into();
    let ztunnel = bench.ztunnel()?.acknowledge_all(Duration::ZERO);
    ztunnel.await_pods(&all, retry(bench))?;
    ztunnel.stop().map(drop)
}
