//! Cases about the answer to each request, and about the valid forms of a request.

use super::{
    bench::{Bench, QUIET},
    session::{Answer, Session},
};
use crate::{
    case::{Case, Outcome, failed},
    netns::Netns,
    wire,
};

pub(super) const CASES: &[Case<Bench>] = &[
    Case {
        name: "one-answer-per-request",
        about: "Every request gets exactly one answer, and nothing else is ever said.",
        rules: &["Z3", "Z4"],
        run: one_answer_per_request,
    },
    Case {
        name: "answers-in-order",
        about: "Requests that are under way together are answered in their order.",
        rules: &["Z3"],
        run: answers_in_order,
    },
    Case {
        name: "longest-request",
        about: "A request of 1024 bytes is carried out.",
        rules: &["Z5"],
        run: request_of_maximum_size,
    },
    Case {
        name: "unknown-fields",
        about: "Fields that are not known, in requests that are, change nothing.",
        rules: &["Z20"],
        run: unknown_fields,
    },
];

fn one_answer_per_request(bench: &mut Bench) -> Outcome {
    let (session, pod) = (bench.greeted()?, bench.pod()?);
    session.ok(wire::keep("unknown"))?;
    session.silent(QUIET)?;
    session.add("a", &pod)?;
    session.silent(QUIET)?;
    session.ok(wire::snapshot_sent())?;
    session.silent(QUIET)?;
    for _ in 0..5 {
        session.add("a", &pod)?;
        session.ok(wire::del("unknown"))?;
    }
    session.silent(QUIET)?;
    session.ok(wire::del("a"))?;
    session.silent(QUIET)
}

fn answers_in_order(bench: &mut Bench) -> Outcome {
    let (session, good, bad) = (bench.live()?, bench.pod()?, bench.pod()?);
    let taken = bad.take_hbone_port()?;
    session.send(
        "Add good",
        &wire::encode(wire::add("good")),
        &[good.descriptor()],
    )?;
    session.send(
        "Add bad",
        &wire::encode(wire::add("bad")),
        &[bad.descriptor()],
    )?;
    session.send("Del good", &wire::encode(wire::del("good")), &[])?;
    let acknowledged = |answer, name| match answer {
        Answer::Ok => Ok(()),
        Answer::Nack(error) => failed(
            format!("{name} is acknowledged"),
            format!("refused: {error}"),
        ),
    };
    acknowledged(session.answer("Add good")?, "the first of three, Add good,")?;
    session
        .answer("Add bad")?
        .refused("failure to start proxy", "the second of three, Add bad,")?;
    acknowledged(session.answer("Del good")?, "the third of three, Del good,")?;
    drop(taken);
    session.silent(QUIET)
}

fn request_of_maximum_size(bench: &mut Bench) -> Outcome {
    let (session, pod) = (bench.live()?, bench.pod()?);
    let request = wire::add(&uid_of_packet(wire::MAX_REQUEST_BYTES));
    let bytes = wire::encode(request);
    let name = format!("an Add of {} bytes", bytes.len());
    answered(&session, &name, &bytes, Some(&pod))?;
    bench.served(&pod, &format!("after {name}")).map(drop)
}

/// Returns a UID for an Add of exactly `bytes` bytes.
pub(super) fn uid_of_packet(bytes: usize) -> String {
    let mut uid = String::new();
    while wire::encode(wire::add(&uid)).len() < bytes {
        uid.push('u');
    }
    uid
}

fn unknown_fields(bench: &mut Bench) -> Outcome {
    let (session, pod) = (bench.live()?, bench.pod()?);
    // The packets contain field 15 of AddWorkload and DelWorkload, a length-delimited field.
    let add = b"\x0a\x10\x0a\x01a\x12\x09\x0a\x01n\x12\x01n\x1a\x01s\x7a\x00";
    answered(&session, "an Add with an unknown field", add, Some(&pod))?;
    bench.served(&pod, "after an Add with an unknown field")?;
    answered(
        &session,
        "a Del with an unknown field",
        b"\x12\x06\x12\x01a\x7a\x01x",
        None,
    )?;
    bench.unserved(&pod, "after a Del with an unknown field")
}

fn answered(session: &Session, name: &str, bytes: &[u8], pod: Option<&Netns>) -> Outcome {
    let descriptors: Vec<_> = pod.map(Netns::descriptor).into_iter().collect();
    match session.ask_raw(name, bytes, &descriptors)? {
        Answer::Ok => Ok(()),
        Answer::Nack(error) => failed(
            format!("{name} is acknowledged"),
            format!("refused: {error}"),
        ),
    }
}
