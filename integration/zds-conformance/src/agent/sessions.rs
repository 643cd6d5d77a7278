//! Cases with several ztunnels and many connections.

use std::{
    thread,
    time::{Duration, Instant},
};

use super::{
    bench::{Bench, Pod},
    load::uids,
};
use crate::case::{Case, Outcome, check};

pub(super) const CASES: &[Case<Bench>] = &[
    Case {
        name: "two-ztunnels",
        about: "Two ztunnels are both told of every Add and every Del.",
        rules: &["A17", "A22"],
        run: two_ztunnels,
    },
    Case {
        name: "order-per-pod",
        about: "A pod that comes and goes ends for every ztunnel, a slow one too, as it ended for the agent.",
        rules: &["A17"],
        run: order_per_pod,
    },
    Case {
        name: "silent-ztunnels-hold-up-nobody",
        about: "One ztunnel that answers nothing and one that says no hello do not delay a third.",
        rules: &["A18"],
        run: silent_ztunnels_hold_up_nobody,
    },
    Case {
        name: "new-session-during-changes",
        about: "A ztunnel that connects while pods come and go misses none of it.",
        rules: &["A17", "A8"],
        run: new_session_during_changes,
    },
    Case {
        name: "connections-are-paced",
        about: "A ztunnel that reconnects without any pause is served at most 20 times a second, and then as ever.",
        rules: &["A20"],
        run: connections_are_paced,
    },
];

fn two_ztunnels(bench: &mut Bench) -> Outcome {
    let (first, pod) = (bench.live()?, bench.pod("p0")?);
    let second = bench.synced()?;
    let adding = bench.add(&pod);
    first.next()?.adds("p0", &pod.netns)?;
    second.next()?.adds("p0", &pod.netns)?;
    second.ack()?;
    first.ack()?;
    bench.succeeds(&adding, "p0")?;
    bench.remove("p0")?;
    first.ack_next()?.is("Del p0")?;
    second.ack_next()?.is("Del p0")
}

/// An agent need not report pods that came and went meanwhile, because only the final state counts.
fn order_per_pod(bench: &mut Bench) -> Outcome {
    let (quick, pod, last) = (
        bench.live()?.acknowledge_all(Duration::ZERO),
        bench.pod("p0")?,
        bench.pod("last")?,
    );
    let slow = bench.synced()?.acknowledge_all(Duration::from_millis(30));
    for _ in 0..10 {
        bench.added(&pod)?;
        bench.remove("p0")?;
    }
    bench.added(&last)?;
    let wanted = [last.workload.uid.clone()].into();
    quick.await_pods(&wanted, bench.deadline())?;
    slow.await_pods(&wanted, bench.deadline())?;
    quick.stop()?;
    slow.stop().map(drop)
}

fn silent_ztunnels_hold_up_nobody(bench: &mut Bench) -> Outcome {
    let (silent, pods) = (bench.live()?, bench.pods(3)?);
    let nameless = bench.connect()?;
    let acknowledging = bench.synced()?.acknowledge_all(Duration::ZERO);
    let begun = Instant::now();
    for pod in &pods {
        bench.added(pod)?;
    }
    let took = begun.elapsed();
    let most = bench.setting().ack_timeout / 2;
    check(
        took < most,
        &format!("A18: three adds within {most:?} beside a silent ztunnel"),
        || format!("{took:?}"),
    )?;
    drop((silent, nameless));
    acknowledging.await_pods(&uids(&pods), bench.deadline())?;
    acknowledging.stop().map(drop)
}

fn new_session_during_changes(bench: &mut Bench) -> Outcome {
    let (old, pods) = (
        bench.live()?.acknowledge_all(Duration::ZERO),
        bench.pods(24)?,
    );
    let (before, during) = pods.split_at(8);
    for pod in before {
        bench.added(pod)?;
    }
    let new = thread::scope(|scope| {
        let changes = scope.spawn(|| change(bench, during));
        let new = bench
            .ztunnel()
            .map(|ztunnel| ztunnel.acknowledge_all(Duration::from_millis(5)));
        let changed = changes.join();
        changed
            .unwrap_or_else(|_| Err(crate::case::Stop::Broken("a change panicked".to_owned())))?;
        new
    })?;
    let stay = during.iter().step_by(2);
    let wanted = uids(before.iter().chain(stay));
    old.await_pods(&wanted, bench.deadline())?;
    new.await_pods(&wanted, bench.deadline())?;
    old.stop()?;
    new.stop().map(drop)
}

fn change(bench: &Bench, pods: &[Pod]) -> Outcome {
    for (number, pod) in pods.iter().enumerate() {
        bench.added(pod)?;
        if number % 2 == 1 {
            bench.remove(&pod.workload.uid)?;
        }
    }
    Ok(())
}

fn connections_are_paced(bench: &mut Bench) -> Outcome {
    const STORM: Duration = Duration::from_secs(3);
    // The limit allows 20 sessions per second after an initial burst.
    const MOST: u32 = 80;
    bench.seeded([])?;
    let begun = Instant::now();
    let mut served = 0_u32;
    while begun.elapsed() < STORM {
        bench.synced()?;
        served = served.saturating_add(1);
    }
    bench.notes.push(format!("{served} sessions in {STORM:?}"));
    check(
        served <= MOST,
        &format!("A20: at most {MOST} sessions in {STORM:?}"),
        || served.to_string(),
    )?;
    bench.synced().map(drop)
}
