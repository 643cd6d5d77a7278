//! Cases about packets in violation of the contract.

use std::{os::fd::BorrowedFd, time::Duration};

use zds_client::proto::{AddWorkload, WorkloadRequest, workload_request::Payload};

use super::{bench::Bench, requests::uid_of_packet, session::Answer};
use crate::{
    case::{Case, Outcome, check},
    netns::Netns,
    wire,
};

pub(super) const CASES: &[Case<Bench>] = &[
    Case {
        name: "add-without-descriptor",
        about: "An Add without a descriptor is a read error.",
        rules: &["Z3", "Z16"],
        run: |bench| {
            read_error(
                bench,
                "an Add without a descriptor",
                &wire::encode(wire::add("x")),
                0,
            )
        },
    },
    Case {
        name: "add-with-two-descriptors",
        about: "An Add with two descriptors is a read error, and both are closed.",
        rules: &["Z16", "Z18"],
        run: |bench| {
            read_error(
                bench,
                "an Add with two descriptors",
                &wire::encode(wire::add("x")),
                2,
            )
        },
    },
    Case {
        name: "del-with-descriptor",
        about: "A Del with a descriptor is a read error, and the descriptor is closed.",
        rules: &["Z16", "Z18"],
        run: |bench| {
            read_error(
                bench,
                "a Del with a descriptor",
                &wire::encode(wire::del("x")),
                1,
            )
        },
    },
    Case {
        name: "undecodable-packet",
        about: "Bytes that are no message are a read error.",
        rules: &["Z16"],
        run: |bench| read_error(bench, "an undecodable packet", b"\xff\xff\xff", 0),
    },
    Case {
        name: "unknown-request",
        about: "A request of a kind that is not known is a read error: new kinds are not compatible.",
        rules: &["Z16"],
        run: |bench| {
            read_error(
                bench,
                "a request of the unknown kind 6",
                b"\x32\x03\x0a\x01x",
                0,
            )
        },
    },
    Case {
        name: "too-long-request",
        about: "A packet of more than 1024 bytes is a read error.",
        rules: &["Z5", "Z16"],
        run: |bench| {
            let bytes = wire::encode(wire::add(&uid_of_packet(
                wire::MAX_REQUEST_BYTES.saturating_add(1),
            )));
            read_error(bench, "an Add of 1025 bytes", &bytes, 1)
        },
    },
    Case {
        name: "empty-packet",
        about: "An empty packet is the end of the connection.",
        rules: &["Z14", "Z16"],
        run: empty_packet,
    },
    Case {
        name: "keep-after-the-snapshot",
        about: "A Keep after SnapshotSent is a protocol error.",
        rules: &["Z17"],
        run: |bench| {
            protocol_error(
                bench,
                "a Keep after SnapshotSent",
                &wire::encode(wire::keep("a")),
                false,
            )
        },
    },
    Case {
        name: "second-snapshot",
        about: "A second SnapshotSent is a protocol error.",
        rules: &["Z17"],
        run: |bench| {
            protocol_error(
                bench,
                "a second SnapshotSent",
                &wire::encode(wire::snapshot_sent()),
                false,
            )
        },
    },
    Case {
        name: "add-without-info",
        about: "An Add that does not say who the pod is is a protocol error.",
        rules: &["Z17"],
        run: |bench| {
            protocol_error(
                bench,
                "an Add without workload_info",
                &add_without_info(),
                true,
            )
        },
    },
];

/// Checks a read error: the connection ends after the answer, the next connection follows, and running pods are
/// unaffected.
fn read_error(bench: &mut Bench, name: &str, bytes: &[u8], descriptors: usize) -> Outcome {
    let (session, pod, other) = (bench.live()?, bench.pod()?, bench.pod()?);
    session.add("a", &pod)?;
    let before = bench.served(&pod, "after Add")?;
    let held = session.settled_descriptors().ok();
    let beside = vec![other.descriptor(); descriptors];
    session
        .ask_raw(name, bytes, &beside)?
        .refused("failure to read message", name)?;
    session.ended()?;
    let session = bench.reconnected()?;
    bench.unchanged(&pod, &before, &format!("after {name}"))?;
    let ports = other.ports()?;
    check(
        ports.is_empty(),
        &format!("no listeners from {name}"),
        || format!("{ports:?}"),
    )?;
    session.add("a", &pod)?;
    session.ok(wire::snapshot_sent())?;
    bench.unchanged(
        &pod,
        &before,
        &format!("after {name} and the next snapshot"),
    )?;
    let Some(held) = held else { return Ok(()) };
    let now = session.await_descriptors(held)?;
    check(
        now <= held,
        &format!("{held} descriptors as before {name}"),
        || format!("{now}"),
    )
}

fn empty_packet(bench: &mut Bench) -> Outcome {
    let (session, pod) = (bench.live()?, bench.pod()?);
    session.add("a", &pod)?;
    let before = bench.served(&pod, "after Add")?;
    session.send("an empty packet", b"", &[])?;
    session.ended()?;
    let session = bench.reconnected()?;
    bench.unchanged(&pod, &before, "after an empty packet")?;
    session.ok(wire::keep("a"))?;
    session.ok(wire::snapshot_sent())
}

/// Checks a protocol error: the request is refused and the connection ends. An end of the process is only noted.
fn protocol_error(bench: &mut Bench, name: &str, bytes: &[u8], with_descriptor: bool) -> Outcome {
    let (session, pod) = (bench.live()?, bench.pod()?);
    session.add("a", &pod)?;
    let beside = beside(&pod, with_descriptor);
    let answer: Answer = session.ask_raw(name, bytes, &beside)?;
    answer.refused("failure to process message", name)?;
    session.ended()?;
    match bench.await_end(Duration::from_secs(1)) {
        Some(end) => bench
            .notes
            .push(format!("after {name} the process ended with {end}")),
        None => {
            bench.reconnected()?;
            bench
                .notes
                .push(format!("after {name} the process went on and reconnected"));
        }
    }
    Ok(())
}

fn beside(pod: &Netns, with_descriptor: bool) -> Vec<BorrowedFd<'_>> {
    with_descriptor
        .then(|| pod.descriptor())
        .into_iter()
        .collect()
}

fn add_without_info() -> Vec<u8> {
    let uid = "x".to_owned();
    let add = AddWorkload {
        uid,
        workload_info: None,
    };
    let payload = Some(Payload::Add(add));
    prost::Message::encode_to_vec(&WorkloadRequest { payload })
}
