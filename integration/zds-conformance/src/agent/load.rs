//! Cases with many pods and many repetitions, about load and leaked descriptors.

use std::{collections::BTreeSet, thread, time::Duration};

use super::bench::{Bench, Pod};
use crate::{
    case::{Case, Outcome, Stop, check},
    process,
};

pub(super) const CASES: &[Case<Bench>] = &[
    Case {
        name: "descriptors-are-returned",
        about: "After many cycles of add and remove, with sessions that come and go, no more netns are held than before.",
        rules: &["A24"],
        run: descriptors_are_returned,
    },
    Case {
        name: "storm",
        about: "Many pods are added at once and removed again; every ztunnel ends with what is desired.",
        rules: &["A4", "A8", "A17"],
        run: storm,
    },
];

const CYCLES: usize = 30;

const CALLERS: usize = 8;

fn descriptors_are_returned(bench: &mut Bench) -> Outcome {
    let mut ztunnel = bench.live()?;
    let unseen = || Stop::Skipped("the agent's process cannot be seen from here".to_owned());
    let pid = ztunnel.pid().ok_or_else(unseen)?;
    let held = || process::netns_descriptors(pid).map_err(|_| unseen());
    let pod = bench.pod("p0")?;
    let before = held()?;
    for cycle in 0..CYCLES {
        let acknowledging = ztunnel.acknowledge_all(Duration::ZERO);
        bench.added(&pod)?;
        bench.remove("p0")?;
        acknowledging.await_pods(&BTreeSet::new(), bench.deadline())?;
        ztunnel = acknowledging.stop()?;
        if cycle % 10 == 9 {
            drop(ztunnel);
            ztunnel = bench.synced()?;
        }
    }
    let after = held()?;
    let expected = format!("A24: {before} netns held, as before {CYCLES} cycles");
    check(after <= before, &expected, || after.to_string())
}

fn storm(bench: &mut Bench) -> Outcome {
    let (ztunnel, pods) = (
        bench.live()?.acknowledge_all(Duration::ZERO),
        bench.pods(bench.setting().storm)?,
    );
    let each = pods.len().div_ceil(CALLERS).max(1);
    in_parallel(pods.chunks(each), |pod| bench.added(pod))?;
    let all = pods.iter().map(|pod| pod.workload.uid.clone()).collect();
    ztunnel.await_pods(&all, bench.deadline())?;
    let second = bench.ztunnel()?.acknowledge_all(Duration::ZERO);
    second.await_pods(&all, bench.deadline())?;
    in_parallel(pods.chunks(each), |pod| bench.remove(&pod.workload.uid))?;
    let none = BTreeSet::new();
    ztunnel.await_pods(&none, bench.deadline())?;
    second.await_pods(&none, bench.deadline())?;
    ztunnel.stop()?;
    second.stop().map(drop)
}

fn in_parallel<'a>(
    chunks: impl Iterator<Item = &'a [Pod]>,
    act: impl Fn(&Pod) -> Outcome + Sync,
) -> Outcome {
    let act = &act;
    thread::scope(|scope| {
        let callers: Vec<_> = chunks
            .map(|chunk| scope.spawn(move || chunk.iter().try_for_each(act)))
            .collect();
        callers.into_iter().try_for_each(|caller| {
            let ended = caller.join();
            ended.unwrap_or_else(|_| Err(Stop::Broken("a caller panicked".to_owned())))
        })
    })
}
