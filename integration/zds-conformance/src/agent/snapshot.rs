//! Cases about the first messages of a session.

use std::{collections::BTreeSet, time::Duration};

use zds_client::proto::workload_request::Payload;

use super::{
    bench::{Bench, Pod, QUIET},
    peer::Request,
};
use crate::case::{Case, Outcome, Stop, check, failed};

pub(super) const CASES: &[Case<Bench>] = &[
    Case {
        name: "nothing-before-the-set",
        about: "An agent that does not know its set says nothing; once it does, the snapshot comes.",
        rules: &["A3"],
        run: nothing_before_the_set,
    },
    Case {
        name: "empty-snapshot",
        about: "A snapshot without pods is SnapshotSent alone, once.",
        rules: &["A8"],
        run: |bench| {
            bench.seeded([])?;
            let ztunnel = bench.ztunnel()?;
            ztunnel.ack_next()?.is("SnapshotSent")?;
            ztunnel.silent(QUIET)
        },
    },
    Case {
        name: "snapshot-names-each-pod-once",
        about: "Each pod is added once, with its own netns, then the snapshot ends, then nothing.",
        rules: &["A5", "A6", "A7", "A8"],
        run: snapshot_names_each_pod_once,
    },
    Case {
        name: "one-at-a-time",
        about: "While a request waits for its answer there is no other.",
        rules: &["A4"],
        run: one_at_a_time,
    },
    Case {
        name: "keep-while-the-netns-is-unknown",
        about: "A pod whose netns is not known is kept in the snapshot, and never after it.",
        rules: &["A8", "A9"],
        run: keep_while_the_netns_is_unknown,
    },
    Case {
        name: "other-information-in-the-snapshot",
        about: "A pod whose information changes within the snapshot ends with the new information, after a Del.",
        rules: &["A21"],
        run: other_information_in_the_snapshot,
    },
    Case {
        name: "each-session-is-told-everything",
        about: "A ztunnel that connects again is told everything again.",
        rules: &["A8"],
        run: each_session_is_told_everything,
    },
    Case {
        name: "snapshot-that-broke-off",
        about: "After a connection that ended within its snapshot the next one is told everything.",
        rules: &["A8", "A11"],
        run: snapshot_that_broke_off,
    },
];

fn nothing_before_the_set(bench: &mut Bench) -> Outcome {
    let pod = bench.pod("p0")?;
    bench.start()?;
    let ztunnel = bench.ztunnel()?;
    ztunnel.silent(Duration::from_secs(1))?;
    bench.seed([&pod])?;
    ztunnel.ack_next()?.adds("p0", &pod.netns)?;
    ztunnel.ack_next()?.is("SnapshotSent")
}

fn all_added(all: &[Request], pods: &[Pod]) -> Outcome {
    for pod in pods {
        let uid = pod.workload.uid.as_str();
        let mut of_pod = all.iter().filter(|request| request.uid() == Some(uid));
        match (of_pod.next(), of_pod.next()) {
            (Some(request), None) => request.adds(uid, &pod.netns)?,
            (None, _) => return failed(format!("A8: {uid} in the snapshot"), describe_all(all)),
            (Some(_), Some(_)) => {
                return failed(format!("A8: {uid} once in the snapshot"), describe_all(all));
            }
        }
    }
    check(
        all.len() == pods.len(),
        "A8: nothing but the set in the snapshot",
        || describe_all(all),
    )
}

fn describe_all(all: &[Request]) -> String {
    let described: Vec<_> = all.iter().map(Request::describe).collect();
    format!("{described:?}")
}

fn snapshot_names_each_pod_once(bench: &mut Bench) -> Outcome {
    let pods = bench.pods(3)?;
    bench.seeded(&pods)?;
    let ztunnel = bench.ztunnel()?;
    all_added(&ztunnel.snapshot()?, &pods)?;
    ztunnel.silent(QUIET)
}

fn one_at_a_time(bench: &mut Bench) -> Outcome {
    let pods = bench.pods(3)?;
    bench.seeded(&pods)?;
    let ztunnel = bench.ztunnel()?;
    let hold = Duration::from_millis(700).min(bench.setting().ack_timeout / 2);
    for _ in &pods {
        ztunnel.next()?;
        ztunnel.silent(hold)?;
        ztunnel.ack()?;
    }
    ztunnel.ack_next()?.is("SnapshotSent")
}

fn keep_while_the_netns_is_unknown(bench: &mut Bench) -> Outcome {
    if !bench.setting().driver.can_withhold_netns() {
        return Err(Stop::Skipped(
            "the driver cannot withhold a netns".to_owned(),
        ));
    }
    let (known, mut unknown) = (bench.pod("known")?, bench.pod("unknown")?);
    unknown.workload.netns = None;
    bench.seeded([&known, &unknown])?;
    let ztunnel = bench.ztunnel()?;
    let all = ztunnel.snapshot()?;
    let kept = |request: &&Request| matches!(request.payload, Payload::Keep(_));
    let kept: Vec<_> = all.iter().filter(kept).map(Request::describe).collect();
    check(
        kept == ["Keep unknown"],
        "Keep unknown, and no other Keep",
        || describe_all(&all),
    )?;
    // The peer checks every packet, so a Keep would fail.
    ztunnel.silent(QUIET)
}

fn other_information_in_the_snapshot(bench: &mut Bench) -> Outcome {
    let mut pods = bench.pods(2)?;
    bench.seeded(&pods)?;
    let ztunnel = bench.ztunnel()?;
    let first = ztunnel.next()?;
    let changed = pods
        .iter_mut()
        .find(|pod| Some(pod.workload.uid.as_str()) == first.uid());
    let Some(changed) = changed else {
        return failed("an Add of a pod of the set", first.describe());
    };
    changed.workload.service_account = "another".to_owned();
    let adding = bench.add(changed);
    // The call has to arrive before the answer, which a driver does not report.
    ztunnel.silent(QUIET)?;
    ztunnel.ack()?;
    let uid = &changed.workload.uid;
    let (mut requests, mut is_deleted) = (Vec::new(), false);
    loop {
        let Some(request) = ztunnel.within(bench.deadline())? else {
            let expected = format!("A21: Del {uid}, then Add {uid} with the new account");
            return failed(expected, format!("{requests:?}"));
        };
        ztunnel.ack()?;
        requests.push(request.describe());
        is_deleted |= request.describe() == format!("Del {uid}");
        if let Payload::Add(add) = &request.payload
            && add.uid == *uid
            && let Some(info) = &add.workload_info
            && info.service_account == "another"
        {
            let expected = format!("A21: Del {uid} before the Add with the new account");
            check(is_deleted, &expected, || format!("{requests:?}"))?;
            return bench.succeeds(&adding, uid);
        }
    }
}

fn each_session_is_told_everything(bench: &mut Bench) -> Outcome {
    let pods = bench.pods(3)?;
    bench.seeded(&pods)?;
    for _ in 0..3 {
        all_added(&bench.ztunnel()?.snapshot()?, &pods)?;
    }
    Ok(())
}

/// A pod in flight at the end of the connection may come after the other pods.
fn snapshot_that_broke_off(bench: &mut Bench) -> Outcome {
    let pods = bench.pods(3)?;
    bench.seeded(&pods)?;
    drop(bench.ztunnel()?);
    let broken = bench.ztunnel()?;
    broken.ack_next()?;
    broken.next()?;
    drop(broken);
    let all: BTreeSet<_> = pods.iter().map(|pod| pod.workload.uid.clone()).collect();
    let ztunnel = bench.ztunnel()?.acknowledge_all(Duration::ZERO);
    ztunnel.await_pods(&all, bench.given_up())?;
    ztunnel.stop().map(drop)
}
