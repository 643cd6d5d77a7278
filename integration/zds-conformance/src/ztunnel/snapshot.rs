//! Cases about the effect of a snapshot on the pods of the previous connection.

use std::{thread, time::Duration};

use super::{
    bench::{Bench, QUIET},
    session::Session,
};
use crate::{
    case::{Case, Outcome},
    netns::{Listening, Netns},
    wire,
};

pub(super) const CASES: &[Case<Bench>] = &[
    Case {
        name: "pods-outlive-the-connection",
        about: "Pods run on while there is no connection and through the next snapshot that names them.",
        rules: &["Z7", "Z13"],
        run: pods_outlive_the_connection,
    },
    Case {
        name: "snapshot-stops-the-unnamed",
        about: "A pod that the new snapshot does not name is stopped at its end.",
        rules: &["Z12"],
        run: snapshot_stops_the_unnamed,
    },
    Case {
        name: "nothing-stops-before-the-snapshot-ends",
        about: "A pod that was not named yet runs until SnapshotSent, however long that takes.",
        rules: &["Z12", "Z13"],
        run: nothing_stops_before_the_snapshot_ends,
    },
    Case {
        name: "keep-of-a-known-pod",
        about: "A pod that is kept goes on with the same listeners.",
        rules: &["Z11"],
        run: keep_of_a_known_pod,
    },
    Case {
        name: "keep-of-an-unknown-pod",
        about: "A Keep of a pod that is not served is acknowledged, and an Add after it works.",
        rules: &["Z11"],
        run: keep_of_an_unknown_pod,
    },
    Case {
        name: "del-in-the-snapshot",
        about: "A pod that was named and then deleted in the snapshot is gone after it.",
        rules: &["Z10"],
        run: del_in_the_snapshot,
    },
    Case {
        name: "deleted-pod-is-named-again",
        about: "An Add after a Del within the snapshot names the pod.",
        rules: &["Z10"],
        run: deleted_pod_is_named_again,
    },
    Case {
        name: "broken-snapshot",
        about: "A connection that ends within its snapshot stops nothing, and its names do not count for the next.",
        rules: &["Z12", "Z13"],
        run: broken_snapshot,
    },
];

/// The state after a reconnection: pods a and b are served, and the agent has a new connection with its hello.
struct Again {
    session: Session,
    a: (Netns, Vec<Listening>),
    b: (Netns, Vec<Listening>),
}

fn again(bench: &mut Bench) -> Outcome<Again> {
    let (session, a, b) = (bench.greeted()?, bench.pod()?, bench.pod()?);
    session.add("a", &a)?;
    session.add("b", &b)?;
    session.ok(wire::snapshot_sent())?;
    let a = (bench.served(&a, "after Add")?, a);
    let b = (bench.served(&b, "after Add")?, b);
    drop(session);
    let session = bench.reconnected()?;
    let (a, b) = ((a.1, a.0), (b.1, b.0));
    Ok(Again { session, a, b })
}

fn pods_outlive_the_connection(bench: &mut Bench) -> Outcome {
    let Again { session, a, b } = again(bench)?;
    bench.unchanged(&a.0, &a.1, "after a reconnect")?;
    session.add("a", &a.0)?;
    session.add("b", &b.0)?;
    session.ok(wire::snapshot_sent())?;
    bench.unchanged(&a.0, &a.1, "after the next snapshot")?;
    bench.unchanged(&b.0, &b.1, "after the next snapshot")
}

fn snapshot_stops_the_unnamed(bench: &mut Bench) -> Outcome {
    let Again { session, a, b } = again(bench)?;
    session.add("a", &a.0)?;
    session.ok(wire::snapshot_sent())?;
    bench.unserved(&b.0, "that the snapshot did not name")?;
    bench.unchanged(&a.0, &a.1, "that the snapshot named")
}

fn nothing_stops_before_the_snapshot_ends(bench: &mut Bench) -> Outcome {
    let Again { session, a, b } = again(bench)?;
    session.ok(wire::keep("a"))?;
    thread::sleep(Duration::from_secs(1));
    bench.unchanged(&b.0, &b.1, "before SnapshotSent")?;
    bench.unchanged(&a.0, &a.1, "before SnapshotSent")?;
    session.ok(wire::snapshot_sent())?;
    bench.unserved(&b.0, "that the snapshot did not name")
}

fn keep_of_a_known_pod(bench: &mut Bench) -> Outcome {
    let Again { session, a, b } = again(bench)?;
    session.ok(wire::keep("a"))?;
    session.ok(wire::keep("b"))?;
    session.ok(wire::snapshot_sent())?;
    thread::sleep(QUIET);
    bench.unchanged(&a.0, &a.1, "that was kept")?;
    bench.unchanged(&b.0, &b.1, "that was kept")?;
    session.ok(wire::del("a"))?;
    bench.unserved(&a.0, "that was kept and then deleted")
}

fn keep_of_an_unknown_pod(bench: &mut Bench) -> Outcome {
    let (session, pod) = (bench.greeted()?, bench.pod()?);
    session.ok(wire::keep("a"))?;
    session.ok(wire::snapshot_sent())?;
    session.add("a", &pod)?;
    bench
        .served(&pod, "that was kept before it was added")
        .map(drop)
}

fn del_in_the_snapshot(bench: &mut Bench) -> Outcome {
    let Again { session, a, b } = again(bench)?;
    session.ok(wire::keep("a"))?;
    session.add("b", &b.0)?;
    session.ok(wire::del("b"))?;
    session.ok(wire::snapshot_sent())?;
    bench.unserved(&b.0, "that was deleted in the snapshot")?;
    bench.unchanged(&a.0, &a.1, "that was kept")
}

fn deleted_pod_is_named_again(bench: &mut Bench) -> Outcome {
    let Again { session, a, b } = again(bench)?;
    session.ok(wire::keep("a"))?;
    session.add("b", &b.0)?;
    session.ok(wire::del("b"))?;
    session.add("b", &b.0)?;
    session.ok(wire::snapshot_sent())?;
    bench.served(&b.0, "that was named again after its Del")?;
    bench.unchanged(&a.0, &a.1, "that was kept")
}

fn broken_snapshot(bench: &mut Bench) -> Outcome {
    let Again { session, a, b } = again(bench)?;
    session.ok(wire::keep("b"))?;
    drop(session);
    let session = bench.reconnected()?;
    bench.unchanged(&a.0, &a.1, "after a snapshot that broke off")?;
    bench.unchanged(&b.0, &b.1, "after a snapshot that broke off")?;
    session.ok(wire::keep("a"))?;
    session.ok(wire::snapshot_sent())?;
    bench.unserved(&b.0, "that only the broken snapshot named")?;
    bench.unchanged(&a.0, &a.1, "that was kept")
}
