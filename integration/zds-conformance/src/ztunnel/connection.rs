//! Cases about finding the agent, the hello, and reconnecting.

use std::{
    thread,
    time::{Duration, Instant},
};

use super::bench::{Bench, QUIET};
use crate::{
    case::{Case, Outcome, check},
    wire,
};

pub(super) const CASES: &[Case<Bench>] = &[
    Case {
        name: "hello-first",
        about: "The first packet is the hello of version 1, it comes unasked, and nothing follows it.",
        rules: &["Z2", "Z4"],
        run: |bench| bench.greeted()?.silent(QUIET),
    },
    Case {
        name: "agent-starts-later",
        about: "A ztunnel that was there first finds the agent's socket once there is one.",
        rules: &["Z1"],
        run: agent_starts_later,
    },
    Case {
        name: "reconnects-after-close",
        about: "Each end of a connection is followed by the next connection and its hello.",
        rules: &["Z14"],
        run: |bench| {
            drop(bench.live()?);
            (0..5).try_for_each(|_| bench.reconnected().map(drop))
        },
    },
    Case {
        name: "agent-half-closes",
        about: "An agent that sends no more has ended the connection.",
        rules: &["Z14"],
        run: |bench| {
            let session = bench.live()?;
            session.half_close()?;
            session.ended()?;
            bench.reconnected().map(drop)
        },
    },
    Case {
        name: "agent-restarts",
        about: "A socket that is removed and made again is found, and pods run on meanwhile.",
        rules: &["Z1", "Z13", "Z14"],
        run: agent_restarts,
    },
    Case {
        name: "slow-agent",
        about: "A silent agent is waited for: before the snapshot, in it and after it.",
        rules: &["Z4", "Z19"],
        run: slow_agent,
    },
];

/// The cases with long waits, which run only on request.
pub(super) const THOROUGH: &[Case<Bench>] = &[
    Case {
        name: "agent-away-for-long",
        about: "Pods run on while the agent is away for 45 s, and the ztunnel returns within 15 s.",
        rules: &["Z1", "Z13"],
        run: agent_away_for_long,
    },
    Case {
        name: "silence-before-the-snapshot",
        about: "The ztunnel waits for an agent without a packet for 30 s after the hello.",
        rules: &["Z4", "Z19"],
        run: |bench| {
            let session = bench.greeted()?;
            session.silent(LONG_SILENCE)?;
            session.ok(wire::snapshot_sent())
        },
    },
    Case {
        name: "silence-in-the-snapshot",
        about: "The ztunnel waits for an agent without a packet for 30 s within the snapshot.",
        rules: &["Z4", "Z19"],
        run: |bench| {
            let (session, pod) = (bench.greeted()?, bench.pod()?);
            session.add("a", &pod)?;
            session.silent(LONG_SILENCE)?;
            session.ok(wire::snapshot_sent())
        },
    },
    Case {
        name: "silence-after-the-snapshot",
        about: "The ztunnel waits for an agent without a packet for 30 s after the snapshot.",
        rules: &["Z4", "Z19"],
        run: |bench| {
            let (session, pod) = (bench.live()?, bench.pod()?);
            session.silent(LONG_SILENCE)?;
            session.add("a", &pod)
        },
    },
];

const LONG_SILENCE: Duration = Duration::from_secs(30);

/// The time without an agent, after which delays that double from 20 ms have grown past [`MAX_RECONNECT_DELAY`].
const LONG_ABSENCE: Duration = Duration::from_secs(45);

/// The longest delay between two attempts to connect.
const MAX_RECONNECT_DELAY: Duration = Duration::from_secs(15);

fn agent_away_for_long(bench: &mut Bench) -> Outcome {
    let (session, pod) = (bench.live()?, bench.pod()?);
    session.add("a", &pod)?;
    let before = bench.served(&pod, "after Add")?;
    bench.stop_listening();
    drop(session);
    let end = Instant::now() + LONG_ABSENCE;
    while Instant::now() < end {
        thread::sleep(QUIET);
        bench.unchanged(&pod, &before, "while the agent is away")?;
    }
    bench.listen()?;
    let session = bench.accept_within(MAX_RECONNECT_DELAY + bench.deadline())?;
    session.hello()?;
    session.ok(wire::keep("a"))?;
    session.ok(wire::snapshot_sent())?;
    bench.unchanged(&pod, &before, "after the agent's return")
}

fn agent_starts_later(bench: &mut Bench) -> Outcome {
    bench.spawn()?;
    thread::sleep(QUIET);
    bench.listen()?;
    bench.reconnected().map(drop)
}

fn agent_restarts(bench: &mut Bench) -> Outcome {
    let (session, pod) = (bench.live()?, bench.pod()?);
    session.add("a", &pod)?;
    let before = bench.served(&pod, "after Add")?;
    bench.stop_listening();
    drop(session);
    thread::sleep(QUIET);
    bench.unchanged(&pod, &before, "while the agent is away")?;
    bench.listen()?;
    let session = bench.reconnected()?;
    session.ok(wire::keep("a"))?;
    session.ok(wire::snapshot_sent())?;
    bench.unchanged(&pod, &before, "after the agent's restart")
}

fn slow_agent(bench: &mut Bench) -> Outcome {
    const SLOW: Duration = Duration::from_secs(2);
    let (session, pod) = (bench.greeted()?, bench.pod()?);
    session.silent(SLOW)?;
    session.add("a", &pod)?;
    session.silent(SLOW)?;
    session.ok(wire::snapshot_sent())?;
    session.silent(SLOW)?;
    session.ok(wire::del("a"))?;
    let ports = pod.await_ports(&[], bench.deadline())?;
    check(ports.is_empty(), "no listeners after Del", || {
        format!("{ports:?}")
    })
}
