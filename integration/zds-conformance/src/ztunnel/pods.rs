//! Cases about the effect of Add and Del on a pod.

use super::bench::Bench;
use crate::{
    case::{Case, Outcome, check},
    wire,
};

pub(super) const CASES: &[Case<Bench>] = &[
    Case {
        name: "add-opens-listeners",
        about: "With its acknowledgement the listeners are open, in the pod that was given and in no other.",
        rules: &["Z6"],
        run: add_opens_listeners,
    },
    Case {
        name: "listeners-are-marked",
        about: "With its acknowledgement the listeners of a pod carry ztunnel's mark.",
        rules: &["Z21"],
        run: listeners_are_marked,
    },
    Case {
        name: "del-closes-listeners",
        about: "A pod that is deleted loses its listeners, and another one does not.",
        rules: &["Z9"],
        run: del_closes_listeners,
    },
    Case {
        name: "del-of-an-unknown-pod",
        about: "A Del of a pod that was never added is acknowledged, before the snapshot and after it.",
        rules: &["Z9"],
        run: del_of_an_unknown_pod,
    },
    Case {
        name: "same-netns-restarts-nothing",
        about: "An Add of the same pod in the same netns is acknowledged and leaves its listeners alone.",
        rules: &["Z7"],
        run: same_netns_restarts_nothing,
    },
    Case {
        name: "other-netns-moves",
        about: "An Add of the same pod in another netns moves its listeners there.",
        rules: &["Z8"],
        run: other_netns_moves,
    },
    Case {
        name: "deleted-pod-comes-back",
        about: "A pod that was deleted can be added again, with other information too.",
        rules: &["Z6", "Z9"],
        run: deleted_pod_comes_back,
    },
];

fn listeners_are_marked(bench: &mut Bench) -> Outcome {
    let (session, pod) = (bench.greeted()?, bench.pod()?);
    session.add("a", &pod)?;
    bench.served(&pod, "with the acknowledgement of its Add")?;
    let unmarked = pod.unmarked_ports()?;
    check(
        unmarked.is_empty(),
        "the mark 0x539 on every listener",
        || format!("no mark on {unmarked:?}"),
    )
}

fn add_opens_listeners(bench: &mut Bench) -> Outcome {
    let (session, first, second) = (bench.greeted()?, bench.pod()?, bench.pod()?);
    session.add("a", &first)?;
    let before = bench.served(&first, "with the acknowledgement of its Add")?;
    let other = second.ports()?;
    check(
        other.is_empty(),
        "no listeners in a pod that was not added",
        || format!("{other:?}"),
    )?;
    session.ok(wire::snapshot_sent())?;
    session.add("b", &second)?;
    bench.served(
        &second,
        "with the acknowledgement of its Add after the snapshot",
    )?;
    bench.unchanged(&first, &before, "after another pod was added")
}

fn del_closes_listeners(bench: &mut Bench) -> Outcome {
    let (session, stays, goes) = (bench.live()?, bench.pod()?, bench.pod()?);
    session.add("stays", &stays)?;
    session.add("goes", &goes)?;
    let before = bench.served(&stays, "after Add")?;
    bench.served(&goes, "after Add")?;
    session.ok(wire::del("goes"))?;
    bench.unserved(&goes, "after Del")?;
    bench.unchanged(&stays, &before, "after the Del of another pod")
}

fn del_of_an_unknown_pod(bench: &mut Bench) -> Outcome {
    let session = bench.greeted()?;
    session.ok(wire::del("unknown"))?;
    session.ok(wire::snapshot_sent())?;
    session.ok(wire::del("unknown"))?;
    let pod = bench.pod()?;
    session.add("a", &pod)?;
    bench.served(&pod, "after Dels of unknown pods").map(drop)
}

fn same_netns_restarts_nothing(bench: &mut Bench) -> Outcome {
    let (session, pod) = (bench.greeted()?, bench.pod()?);
    session.add("a", &pod)?;
    let before = bench.served(&pod, "after Add")?;
    session.add("a", &pod)?;
    bench.unchanged(&pod, &before, "after the same Add in the snapshot")?;
    session.ok(wire::snapshot_sent())?;
    session.add("a", &pod)?;
    bench.unchanged(&pod, &before, "after the same Add after the snapshot")
}

fn other_netns_moves(bench: &mut Bench) -> Outcome {
    let (session, old, new) = (bench.live()?, bench.pod()?, bench.pod()?);
    session.add("a", &old)?;
    bench.served(&old, "after Add")?;
    session.add("a", &new)?;
    bench.served(
        &new,
        "with the acknowledgement of an Add with another netns",
    )?;
    bench.unserved(&old, "whose workload has moved to another netns")?;
    session.ok(wire::del("a"))?;
    bench.unserved(&new, "after Del")
}

fn deleted_pod_comes_back(bench: &mut Bench) -> Outcome {
    let (session, pod) = (bench.live()?, bench.pod()?);
    for _ in 0..3 {
        session.add("a", &pod)?;
        bench.served(&pod, "after Add")?;
        session.ok(wire::del("a"))?;
        bench.unserved(&pod, "after Del")?;
    }
    Ok(())
}
