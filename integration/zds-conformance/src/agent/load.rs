//! Cases with many pods and many repetitions, about load and leaked descriptors.

use std::{
    collections::BTreeSet,
    thread,
    time::{Duration, Instant},
};

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
        name: "descriptors-after-moves",
        about: "A pod that changes its netns, and one that goes while no ztunnel is connected, leave no netns open.",
        rules: &["A24"],
        run: descriptors_after_moves,
    },
    Case {
        name: "removal-under-load",
        about: "While pods are added without a pause, a removed pod is deleted after a few requests.",
        rules: &["A26"],
        run: removal_under_load,
    },
    Case {
        name: "snapshot-under-load",
        about: "While pods are added without a pause, a snapshot ends.",
        rules: &["A26"],
        run: snapshot_under_load,
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

const POLL_INTERVAL: Duration = Duration::from_millis(5);

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

fn descriptors_after_moves(bench: &mut Bench) -> Outcome {
    let ztunnel = bench.live()?;
    let unseen = || Stop::Skipped("the agent's process cannot be seen from here".to_owned());
    let pid = ztunnel.pid().ok_or_else(unseen)?;
    let held = || process::netns_descriptors(pid).map_err(|_| unseen());
    let before = held()?;
    let acknowledging = ztunnel.acknowledge_all(Duration::ZERO);
    let all = ["moves".to_owned()].into();
    for _ in 0..CYCLES {
        bench.added(&bench.pod("moves")?)?;
    }
    acknowledging.await_pods(&all, bench.deadline())?;
    bench.remove("moves")?;
    acknowledging.await_pods(&BTreeSet::new(), bench.deadline())?;
    drop(acknowledging.stop()?);
    for _ in 0..CYCLES {
        bench.seed([&bench.pod("alone")?])?;
        bench.seed([])?;
    }
    bench.synced()?;
    let end = Instant::now() + bench.deadline();
    // Descriptors of a set may be fetched, and closed, a little later.
    while held()? > before && Instant::now() < end {
        thread::sleep(POLL_INTERVAL);
    }
    let after = held()?;
    let expected = format!("A24: {before} netns held, as before {CYCLES} moves");
    check(after <= before, &expected, || after.to_string())
}

/// The number of pods that callers add one after another, and the time that the played ztunnel takes for each request.
const LOAD: usize = 60;
const PAUSE: Duration = Duration::from_millis(20);

/// Requests that may precede a Del: seven others (A26), the request in flight, and the one that the agent had chosen.
const MAX_BEFORE_DEL: usize = 9;

/// Adds all pods by callers of whom one waits at any time, and calls `meanwhile` beside the load.
fn under_load<T: Send>(
    bench: &Bench,
    pods: &[Pod],
    meanwhile: impl FnOnce() -> Outcome<T> + Send,
) -> Outcome<T> {
    thread::scope(|scope| {
        let meanwhile = scope.spawn(meanwhile);
        let each = pods.len().div_ceil(CALLERS);
        let added = in_parallel(pods.chunks(each), |pod| bench.added(pod));
        let outcome = meanwhile.join();
        let outcome = outcome.unwrap_or_else(|_| Err(Stop::Broken("a case panicked".to_owned())));
        added.and(outcome)
    })
}

fn removal_under_load(bench: &mut Bench) -> Outcome {
    let ztunnel = bench.live()?;
    let (gone, pods) = (bench.pod("zz-gone")?, bench.pods(LOAD)?);
    let adding = bench.add(&gone);
    ztunnel.ack_next()?.adds("zz-gone", &gone.netns)?;
    bench.succeeds(&adding, "zz-gone")?;
    let ztunnel = ztunnel.acknowledge_all(PAUSE);
    let bench = &*bench;
    let removed = under_load(bench, &pods, || {
        while ztunnel.view().requests.len() < 5 {
            thread::sleep(POLL_INTERVAL);
        }
        bench.remove("zz-gone")?;
        Ok(ztunnel.view().requests.len())
    })?;
    ztunnel.await_pods(&uids(&pods), bench.deadline())?;
    let requests = ztunnel.view().requests;
    let deleted = requests.iter().position(|it| it == "Del zz-gone");
    // The Del may have arrived before the call returned.
    let before = deleted.unwrap_or(requests.len()).saturating_sub(removed);
    let expected = format!("A26: at most {MAX_BEFORE_DEL} requests before the Del, of {LOAD}");
    check(before <= MAX_BEFORE_DEL, &expected, || before.to_string())?;
    ztunnel.stop().map(drop)
}

fn snapshot_under_load(bench: &mut Bench) -> Outcome {
    let (set, pods) = (bench.pods(3)?, bench.pods(LOAD)?);
    let pods: Vec<_> = pods.into_iter().skip(set.len()).collect();
    bench.seeded(&set)?;
    let ztunnel = bench.ztunnel()?.acknowledge_all(PAUSE);
    let bench = &*bench;
    under_load(bench, &pods, || Ok(()))?;
    ztunnel.await_pods(&uids(set.iter().chain(&pods)), bench.deadline())?;
    let requests = ztunnel.view().requests;
    let until_end = requests.iter().take_while(|it| *it != "SnapshotSent");
    let before = until_end.count();
    let expected = format!("A26: SnapshotSent among the first half of {LOAD} requests");
    check(before <= LOAD / 2, &expected, || before.to_string())?;
    ztunnel.stop().map(drop)
}

pub(super) fn uids<'a>(pods: impl IntoIterator<Item = &'a Pod>) -> BTreeSet<String> {
    let pods = pods.into_iter();
    pods.map(|pod| pod.workload.uid.clone()).collect()
}

fn storm(bench: &mut Bench) -> Outcome {
    let (ztunnel, pods) = (
        bench.live()?.acknowledge_all(Duration::ZERO),
        bench.pods(bench.setting().storm)?,
    );
    let each = pods.len().div_ceil(CALLERS).max(1);
    in_parallel(pods.chunks(each), |pod| bench.added(pod))?;
    let all = uids(&pods);
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
