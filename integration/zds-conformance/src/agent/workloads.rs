//! Cases about changes while a ztunnel is connected.

use zds_client::proto::workload_request::Payload;

use super::bench::{Bench, QUIET};
use crate::case::{Case, Outcome, check, failed};

pub(super) const CASES: &[Case<Bench>] = &[
    Case {
        name: "live-add",
        about: "A pod is added with its netns, and the add succeeds with the acknowledgement and not before.",
        rules: &["A5", "A6", "A22"],
        run: live_add,
    },
    Case {
        name: "live-del",
        about: "A pod that is removed is deleted, once, and no later session hears of it.",
        rules: &["A5", "A23"],
        run: live_del,
    },
    Case {
        name: "add-during-del",
        about: "A pod that is added while its Del is not answered is no success before the next Add is acknowledged.",
        rules: &["A10", "A22"],
        run: add_during_del,
    },
    Case {
        name: "other-netns",
        about: "A pod that has another netns is told with that one; the old one's acknowledgement does not count.",
        rules: &["A5", "A10", "A21"],
        run: other_netns,
    },
    Case {
        name: "other-information",
        about: "A pod whose information changes is deleted and added: an Add alone would be ignored.",
        rules: &["A21"],
        run: other_information,
    },
    Case {
        name: "longest-names",
        about: "A pod with the longest names that Kubernetes allows is told in at most 1024 bytes.",
        rules: &["A7"],
        run: names_of_maximum_length,
    },
    Case {
        name: "too-long-names",
        about: "A pod that does not fit into 1024 bytes is refused before any ztunnel hears of it.",
        rules: &["A7"],
        run: too_long_names,
    },
];

fn live_add(bench: &mut Bench) -> Outcome {
    let (ztunnel, pod) = (bench.live()?, bench.pod("p0")?);
    let adding = bench.add(&pod);
    ztunnel.next()?.adds("p0", &pod.netns)?;
    bench.not_credited(&adding, QUIET, "before its acknowledgement")?;
    ztunnel.ack()?;
    bench.succeeds(&adding, "p0")?;
    ztunnel.silent(QUIET)
}

fn live_del(bench: &mut Bench) -> Outcome {
    let (ztunnel, pods) = (
        bench.live()?.acknowledge_all(std::time::Duration::ZERO),
        bench.pods(2)?,
    );
    for pod in &pods {
        bench.added(pod)?;
    }
    let ztunnel = ztunnel.stop()?;
    bench.remove("p0")?;
    ztunnel.ack_next()?.is("Del p0")?;
    ztunnel.silent(QUIET)?;
    drop(ztunnel);
    let again = bench.ztunnel()?.snapshot()?;
    let named: Vec<_> = again.iter().map(super::peer::Request::describe).collect();
    check(
        named == ["Add p1"],
        "A23: Add p1 alone in the next snapshot",
        || format!("{named:?}"),
    )
}

fn add_during_del(bench: &mut Bench) -> Outcome {
    let (ztunnel, pod) = (bench.live()?, bench.pod("p0")?);
    let adding = bench.add(&pod);
    ztunnel.ack_next()?.adds("p0", &pod.netns)?;
    bench.succeeds(&adding, "p0")?;
    bench.remove("p0")?;
    ztunnel.next()?.is("Del p0")?;
    let adding = bench.add(&pod);
    bench.not_credited(&adding, QUIET, "while the Del of the pod is not answered")?;
    ztunnel.ack()?;
    ztunnel.next()?.adds("p0", &pod.netns)?;
    ztunnel.nack("failure to start proxy : conformance")?;
    bench.not_credited(&adding, QUIET, "that was refused after the Del of the pod")
}

fn other_netns(bench: &mut Bench) -> Outcome {
    let (ztunnel, old, new) = (bench.live()?, bench.pod("p0")?, bench.pod("p0")?);
    let adding = bench.add(&old);
    ztunnel.ack_next()?.adds("p0", &old.netns)?;
    bench.succeeds(&adding, "p0")?;
    let adding = bench.add(&new);
    let mut request = ztunnel.next()?;
    if request.describe() == "Del p0" {
        ztunnel.ack()?;
        request = ztunnel.next()?;
    }
    request.adds("p0", &new.netns)?;
    bench.not_credited(&adding, QUIET, "that was acknowledged in another netns")?;
    ztunnel.ack()?;
    bench.succeeds(&adding, "p0")
}

fn other_information(bench: &mut Bench) -> Outcome {
    let (ztunnel, mut pod) = (bench.live()?, bench.pod("p0")?);
    let adding = bench.add(&pod);
    ztunnel.ack_next()?.adds("p0", &pod.netns)?;
    bench.succeeds(&adding, "p0")?;
    pod.workload.service_account = "another".to_owned();
    let adding = bench.add(&pod);
    ztunnel.ack_next()?.is("Del p0")?;
    let request = ztunnel.ack_next()?;
    request.adds("p0", &pod.netns)?;
    let Payload::Add(add) = &request.payload else {
        return failed("Add p0", request.describe());
    };
    let account = add
        .workload_info
        .as_ref()
        .map(|info| info.service_account.as_str());
    check(
        account == Some("another"),
        "the new service account",
        || format!("{account:?}"),
    )?;
    bench.succeeds(&adding, "p0")
}

fn subdomain() -> String {
    let label = "a".repeat(63);
    format!("{label}.{label}.{label}.{}", "a".repeat(61))
}

fn names_of_maximum_length(bench: &mut Bench) -> Outcome {
    let (ztunnel, mut pod) = (
        bench.live()?,
        bench.pod("00000000-0000-0000-0000-000000000000")?,
    );
    pod.workload.name = subdomain();
    pod.workload.service_account = subdomain();
    pod.workload.namespace = "n".repeat(63);
    let adding = bench.add(&pod);
    let uid = pod.workload.uid.clone();
    ztunnel.ack_next()?.adds(&uid, &pod.netns)?;
    bench.succeeds(&adding, &uid)
}

fn too_long_names(bench: &mut Bench) -> Outcome {
    let (ztunnel, mut long, short) = (bench.live()?, bench.pod("long")?, bench.pod("short")?);
    long.workload.name = "a".repeat(1100);
    let adding = bench.add(&long);
    ztunnel.silent(QUIET)?;
    bench.not_credited(&adding, bench.deadline(), "that no ztunnel can be told")?;
    let adding = bench.add(&short);
    ztunnel.ack_next()?.adds("short", &short.netns)?;
    bench.succeeds(&adding, "short")
}
