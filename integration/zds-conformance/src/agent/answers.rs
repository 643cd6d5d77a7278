//! Cases about answers that are late, missing, too many, or never sent.

use super::bench::{Bench, QUIET};
use crate::{
    case::{Case, Outcome},
    wire::{ACK, HELLO},
};

pub(super) const CASES: &[Case<Bench>] = &[
    Case {
        name: "missing-answer",
        about: "A ztunnel that does not answer in time is sent away, and the add is not credited.",
        rules: &["A10", "A11"],
        run: missing_answer,
    },
    Case {
        name: "late-answer",
        about: "An answer that comes after the time is over is credited to nothing.",
        rules: &["A10", "A11"],
        run: late_answer,
    },
    Case {
        name: "impatient-caller",
        about: "A caller that stops waiting costs no session: ztunnel has longer than the caller.",
        rules: &["A11"],
        run: impatient_caller,
    },
    Case {
        name: "unasked-answer",
        about: "An answer to nothing ends the session.",
        rules: &["A12"],
        run: |bench| {
            let ztunnel = bench.live()?;
            ztunnel.send(ACK)?;
            ztunnel.ended(bench.deadline())
        },
    },
    Case {
        name: "second-answer",
        about: "A second answer to one request ends the session.",
        rules: &["A12"],
        run: second_answer,
    },
    Case {
        name: "undecodable-answer",
        about: "Bytes that are no message end the session and are credited to nothing.",
        rules: &["A10", "A12"],
        run: |bench| no_answer(bench, b"\xff\xff\xff"),
    },
    Case {
        name: "answer-without-payload",
        about: "A message that says neither yes nor no ends the session and is credited to nothing.",
        rules: &["A10", "A12"],
        run: |bench| no_answer(bench, b"\x10\x01"),
    },
    Case {
        name: "hello-for-an-answer",
        about: "A hello is no answer.",
        rules: &["A10", "A12"],
        run: |bench| no_answer(bench, HELLO),
    },
    Case {
        name: "ztunnel-hangs-up",
        about: "A connection that ends before the answer credits nothing; the next session is told the pod.",
        rules: &["A8", "A10"],
        run: hangs_up,
    },
    Case {
        name: "half-closed-connection",
        about: "A ztunnel that sends no more has left: the session ends.",
        rules: &["A19"],
        run: |bench| {
            let ztunnel = bench.live()?;
            ztunnel.half_close()?;
            ztunnel.ended(bench.deadline())?;
            bench.synced().map(drop)
        },
    },
];

fn missing_answer(bench: &mut Bench) -> Outcome {
    let (ztunnel, pod) = (bench.live()?, bench.pod("p0")?);
    let adding = bench.add(&pod);
    ztunnel.next()?.adds("p0", &pod.netns)?;
    bench.not_credited(
        &adding,
        bench.setting().ack_timeout / 2,
        "that was not answered",
    )?;
    ztunnel.ended(bench.given_up())?;
    bench.not_credited(&adding, QUIET, "whose session ended without an answer")
}

fn late_answer(bench: &mut Bench) -> Outcome {
    let (ztunnel, pod) = (bench.live()?, bench.pod("p0")?);
    let adding = bench.add(&pod);
    ztunnel.next()?.adds("p0", &pod.netns)?;
    std::thread::sleep(bench.given_up());
    // The send fails if the agent has closed the connection already.
    drop(ztunnel.send(ACK));
    bench.not_credited(&adding, QUIET, "that was answered too late")?;
    ztunnel.ended(bench.deadline())
}

fn impatient_caller(bench: &mut Bench) -> Outcome {
    let (ztunnel, late, next) = (bench.live()?, bench.pod("late")?, bench.pod("next")?);
    let adding = bench.add_within(&late, bench.setting().ack_timeout / 4);
    ztunnel.next()?.adds("late", &late.netns)?;
    bench.not_credited(
        &adding,
        bench.setting().ack_timeout / 2,
        "that was not answered",
    )?;
    ztunnel.silent(QUIET)?;
    ztunnel.ack()?;
    let adding = bench.add(&next);
    let mut request = ztunnel.ack_next()?;
    // An agent may take the failed pod out of the set.
    if request.describe() == "Del late" {
        request = ztunnel.ack_next()?;
    }
    request.adds("next", &next.netns)?;
    bench.succeeds(&adding, "next")
}

fn second_answer(bench: &mut Bench) -> Outcome {
    let (ztunnel, pod) = (bench.live()?, bench.pod("p0")?);
    let adding = bench.add(&pod);
    ztunnel.ack_next()?.adds("p0", &pod.netns)?;
    bench.succeeds(&adding, "p0")?;
    ztunnel.send(ACK)?;
    ztunnel.ended(bench.deadline())
}

fn no_answer(bench: &mut Bench, bytes: &[u8]) -> Outcome {
    let (ztunnel, pod) = (bench.live()?, bench.pod("p0")?);
    let adding = bench.add(&pod);
    ztunnel.next()?.adds("p0", &pod.netns)?;
    ztunnel.send(bytes)?;
    ztunnel.ended(bench.deadline())?;
    bench.not_credited(&adding, QUIET, "that was not answered")
}

fn hangs_up(bench: &mut Bench) -> Outcome {
    let pod = bench.pod("p0")?;
    bench.seeded([])?;
    let ztunnel = bench.synced()?;
    let adding = bench.add(&pod);
    ztunnel.next()?.adds("p0", &pod.netns)?;
    drop(ztunnel);
    bench.not_credited(&adding, QUIET, "whose ztunnel hung up")?;
    // The agent decides whether the caller still waits, so the case sends the set again: a set with the pod reaches
    // every ztunnel.
    bench.seed([&pod])?;
    let all = [pod.workload.uid].into();
    let ztunnel = bench.ztunnel()?.acknowledge_all(std::time::Duration::ZERO);
    ztunnel.await_pods(&all, bench.given_up())?;
    ztunnel.stop().map(drop)
}
