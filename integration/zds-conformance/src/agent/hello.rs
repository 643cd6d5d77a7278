//! Cases about the socket, and about the beginning of a session.

use std::{fs, os::unix::fs::PermissionsExt as _, time::Duration};

use super::bench::Bench;
use crate::{
    case::{Case, Outcome, Stop, check, failed},
    wire::ACK,
};

pub(super) const CASES: &[Case<Bench>] = &[
    Case {
        name: "socket-permissions",
        about: "Nobody but the agent's own user can open the socket.",
        rules: &["A1"],
        run: socket_permissions,
    },
    Case {
        name: "stale-socket",
        about: "An agent that was killed takes its place again.",
        rules: &["A1"],
        run: stale_socket,
    },
    Case {
        name: "nothing-before-the-hello",
        about: "A ztunnel that has not said hello is told nothing.",
        rules: &["A2"],
        run: nothing_before_the_hello,
    },
    Case {
        name: "hello-missing",
        about: "A ztunnel that says no hello in time is sent away.",
        rules: &["A2", "A13"],
        run: |bench| {
            bench.seeded([])?;
            bench.connect()?.ended(bench.given_up())
        },
    },
    Case {
        name: "hello-of-another-version",
        about: "A ztunnel of another version is sent away and told nothing.",
        rules: &["A13"],
        run: |bench| wrong_hello(bench, b"\x08\x02"),
    },
    Case {
        name: "answer-before-the-hello",
        about: "A ztunnel that begins with anything but the hello is sent away and told nothing.",
        rules: &["A12", "A13"],
        run: |bench| wrong_hello(bench, ACK),
    },
    Case {
        name: "hello-with-unknown-field",
        about: "A hello of version 1 with a field that the agent does not know is a hello.",
        rules: &["A13"],
        run: |bench| {
            bench.seeded([])?;
            let ztunnel = bench.connect()?;
            ztunnel.hello_with(b"\x08\x01\x10\x05")?;
            ztunnel.ack_next()?.is("SnapshotSent")
        },
    },
    Case {
        name: "second-hello",
        about: "A hello in place of an answer ends the session.",
        rules: &["A12"],
        run: |bench| {
            let ztunnel = bench.live()?;
            ztunnel.hello()?;
            ztunnel.ended(bench.deadline())
        },
    },
];

fn socket_permissions(bench: &mut Bench) -> Outcome {
    bench.seeded([])?;
    bench.synced()?;
    let socket = &bench.setting().socket;
    let mode = |path| Ok::<_, Stop>(fs::metadata(path)?.permissions().mode() & 0o777);
    let of_socket = mode(socket.as_path())?;
    let expected = "a socket with mode 0600";
    check(of_socket & 0o077 == 0, expected, || {
        format!("{of_socket:04o}")
    })?;
    if let Some(directory) = socket.parent() {
        let of_directory = mode(directory)?;
        bench.notes.push(format!(
            "the socket's directory has mode {of_directory:04o}"
        ));
    }
    Ok(())
}

fn stale_socket(bench: &mut Bench) -> Outcome {
    bench.start()?;
    bench.seed([])?;
    bench.synced()?;
    bench.kill();
    match bench.seeded([]) {
        Err(Stop::Broken(why)) => failed("an agent that starts where one was killed", why),
        started => started.and_then(|()| bench.synced().map(drop)),
    }
}

fn nothing_before_the_hello(bench: &mut Bench) -> Outcome {
    let pod = bench.pod("p0")?;
    bench.seeded([&pod])?;
    let ztunnel = bench.connect()?;
    ztunnel.silent(Duration::from_secs(1).min(bench.setting().ack_timeout / 2))?;
    ztunnel.hello()?;
    ztunnel.snapshot().map(drop)
}

fn wrong_hello(bench: &mut Bench, hello: &[u8]) -> Outcome {
    let pod = bench.pod("p0")?;
    bench.seeded([&pod])?;
    let ztunnel = bench.connect()?;
    ztunnel.send(hello)?;
    ztunnel.ended(bench.deadline())
}
