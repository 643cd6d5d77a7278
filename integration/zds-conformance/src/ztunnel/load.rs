//! Cases with many pods and many repetitions, about load and leaked descriptors.

use super::bench::Bench;
use crate::{
    case::{Case, Outcome, check},
    netns::{Netns, PORTS},
    wire,
};

pub(super) const CASES: &[Case<Bench>] = &[
    Case {
        name: "descriptors-are-returned",
        about: "After many cycles of Add and Del, refused Adds among them, no more descriptors are held than at first.",
        rules: &["Z18"],
        run: descriptors_are_returned,
    },
    Case {
        name: "storm",
        about: "Many pods are added one after the other and deleted again; each is served, and nothing is left.",
        rules: &["Z3", "Z6", "Z9", "Z18"],
        run: storm,
    },
    Case {
        name: "storm-of-keeps",
        about: "After a reconnect many Keeps and one SnapshotSent change nothing.",
        rules: &["Z3", "Z11"],
        run: storm_of_keeps,
    },
];

const CYCLES: usize = 50;

fn descriptors_are_returned(bench: &mut Bench) -> Outcome {
    let (session, pod, bad) = (bench.live()?, bench.pod()?, bench.pod()?);
    let _taken = bad.take_hbone_port()?;
    let cycle = || {
        session.add("a", &pod)?;
        session.add("a", &pod)?;
        session.ok(wire::del("a"))?;
        session.add_fails("bad", &bad)?;
        session.ok(wire::del("bad"))
    };
    // The first cycle opens the descriptors that are opened only once.
    cycle()?;
    bench.unserved(&pod, "after Del")?;
    let before = session.descriptors()?;
    for _ in 0..CYCLES {
        cycle()?;
    }
    let after = session.await_descriptors(before)?;
    let expected =
        format!("no more than {before} descriptors after {CYCLES} cycles of Add and Del");
    check(after <= before, &expected, || format!("{after}"))
}

fn storm(bench: &mut Bench) -> Outcome {
    let session = bench.live()?;
    let pods = pods(bench)?;
    let before = session.settled_descriptors().ok();
    for (uid, pod) in &pods {
        session.add(uid, pod)?;
    }
    for (uid, pod) in &pods {
        bench.served(pod, &format!("{uid} of {}", pods.len()))?;
    }
    for (uid, _) in &pods {
        session.ok(wire::del(uid))?;
    }
    for (_, pod) in &pods {
        bench.unserved(pod, "after Del")?;
    }
    let Some(before) = before else { return Ok(()) };
    let after = session.await_descriptors(before)?;
    check(
        after <= before,
        &format!("no more than {before} descriptors after the storm"),
        || format!("{after}"),
    )
}

fn storm_of_keeps(bench: &mut Bench) -> Outcome {
    let session = bench.live()?;
    let pods = pods(bench)?;
    for (uid, pod) in &pods {
        session.add(uid, pod)?;
    }
    drop(session);
    let session = bench.reconnected()?;
    for (uid, _) in &pods {
        session.ok(wire::keep(uid))?;
    }
    session.ok(wire::snapshot_sent())?;
    for (uid, pod) in &pods {
        let ports = pod.ports()?;
        check(
            ports == PORTS,
            &format!("listeners in {uid}, which was kept"),
            || format!("{ports:?}"),
        )?;
    }
    Ok(())
}

fn pods(bench: &Bench) -> Outcome<Vec<(String, Netns)>> {
    (0..bench.storm())
        .map(|number| Ok((format!("pod-{number}"), bench.pod()?)))
        .collect()
}
