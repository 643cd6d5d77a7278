//! Random schedules. The operations name pods and sandboxes by number, so that every part of a schedule is a valid
//! schedule.

use fastrand::Rng;

use inpod_service::UninstallMode;

use super::node::{Disk, Fault, Method, NAMES, Patching, Ztunnel};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Op {
    /// From the start, pod-events annotates the pods.
    ApiServer,
    Patching {
        patching: Patching,
    },
    /// A removal of inpod from the node is requested or cancelled.
    Leave {
        mode: Option<UninstallMode>,
    },
    /// Another pod of the same name, with a sidecar.
    Inject {
        pod: usize,
    },
    /// A pod that runs before inpod's first start.
    RanBefore {
        pod: usize,
        labelled: bool,
    },
    /// The runtime starts a new sandbox, whether or not the previous sandbox has ended.
    Start {
        pod: usize,
        labelled: bool,
        previous_ends: bool,
        reuses_path: bool,
        timeout: u64,
        /// The caller leaves after the given milliseconds.
        leaves_after: Option<u64>,
        /// After a failed ADD, the runtime deletes the sandbox.
        cleans_up: bool,
    },
    /// The runtime repeats the ADD of an existing sandbox.
    Repeat {
        back: usize,
        timeout: u64,
    },
    /// The runtime calls ADD again before the previous ADD of the sandbox is answered.
    Twin {
        pod: usize,
        timeout: u64,
    },
    /// An ADD of one pod wrongly carries the container id of another pod's sandbox.
    Confuse {
        back: usize,
    },
    Delete {
        back: usize,
    },
    /// A GC lists the sandboxes whose bits are set.
    Collect {
        listed: u32,
    },
    Check {
        back: usize,
    },
    Label {
        pod: usize,
        labelled: bool,
    },
    Terminate {
        pod: usize,
    },
    Complete {
        pod: usize,
    },
    /// The source stops showing the pod, or shows the pod again.
    Show {
        pod: usize,
        shown: bool,
    },
    /// The pod is replaced by another pod of the same name.
    Recreate {
        pod: usize,
        labelled: bool,
    },
    Gap {
        gap: bool,
    },
    /// The pod's processes end, except for the sandbox's own.
    Exit {
        back: usize,
    },
    Unmount {
        back: usize,
    },
    /// The pod stops completely, in the order of a runtime: processes, netns, and DEL if requested.
    Stop {
        back: usize,
        deletes: bool,
    },
    Flows {
        back: usize,
        flows: u32,
    },
    /// Another program removes rules.
    Tear {
        back: usize,
    },
    LoseListeners {
        back: usize,
    },
    Ztunnel {
        mode: Ztunnel,
    },
    RestartZtunnel,
    RestartNetconfig {
        down: u32,
    },
    RestartBroker {
        down: u32,
    },
    Fault {
        method: Method,
        fault: Fault,
    },
    Disk {
        disk: Disk,
    },
    /// pod-events crashes after the given number of steps, and misses the given number of operations.
    Crash {
        steps: u32,
        missed: usize,
    },
    Wait {
        millis: u64,
    },
}

fn one_of<T: Copy>(rng: &mut Rng, all: &[T]) -> T {
    all[rng.usize(..all.len())]
}

fn fault(rng: &mut Rng) -> Fault {
    let late = one_of(rng, &[100, 1500, 4000]);
    let all = [
        Fault::Refused,
        Fault::AnswerLost,
        Fault::Hangs,
        Fault::AnswerHangs,
        Fault::Late(late),
        Fault::AnswerLate(late),
    ];
    one_of(rng, &all)
}

fn start(rng: &mut Rng) -> Op {
    Op::Start {
        pod: rng.usize(..NAMES.len()),
        labelled: rng.u8(..5) > 0,
        previous_ends: rng.bool(),
        reuses_path: rng.u8(..4) == 0,
        timeout: one_of(rng, &[5, 30]),
        leaves_after: (rng.u8(..8) == 0).then(|| one_of(rng, &[1, 500, 3000])),
        cleans_up: rng.bool(),
    }
}

fn down(rng: &mut Rng) -> u32 {
    one_of(rng, &[0, 50, 3000])
}

fn disturbance(number: u32, rng: &mut Rng) -> Op {
    match number {
        55..58 => Op::Ztunnel {
            mode: one_of(rng, &[Ztunnel::Answers, Ztunnel::Silent, Ztunnel::Refuses]),
        },
        58..59 => Op::RestartZtunnel,
        59..62 => Op::RestartNetconfig { down: down(rng) },
        62..65 => Op::RestartBroker { down: down(rng) },
        65..76 => Op::Fault {
            method: one_of(rng, &Method::ALL),
            fault: fault(rng),
        },
        76..77 => Op::Disk {
            disk: one_of(rng, &[Disk::Works, Disk::Full, Disk::ReadOnly]),
        },
        77..81 => Op::Crash {
            steps: rng.u32(..12),
            missed: one_of(rng, &[0, 0, 0, 1, 2]),
        },
        81..83 => Op::Patching {
            patching: one_of(
                rng,
                &[
                    Patching::Works,
                    Patching::Refused,
                    Patching::AnswerLost,
                    Patching::Hangs,
                ],
            ),
        },
        _ => Op::Leave {
            mode: one_of(
                rng,
                &[
                    None,
                    Some(UninstallMode::Uninstall),
                    Some(UninstallMode::Handover),
                ],
            ),
        },
    }
}

fn op(rng: &mut Rng) -> Op {
    let pod = rng.usize(..NAMES.len());
    let back = rng.usize(..3);
    let labelled = rng.bool();
    match rng.u32(..100) {
        0..12 => start(rng),
        12..15 => Op::Repeat {
            back,
            timeout: one_of(rng, &[5, 30]),
        },
        15..23 => Op::Delete { back },
        23..25 => Op::Collect {
            listed: rng.u32(..8),
        },
        25..27 => Op::Check { back },
        27..34 => Op::Label { pod, labelled },
        34..36 => Op::Terminate { pod },
        36..37 => Op::Complete { pod },
        37..39 => Op::Show {
            pod,
            shown: rng.bool(),
        },
        39..41 => Op::Recreate { pod, labelled },
        41..43 => Op::Gap { gap: rng.bool() },
        43..45 => Op::Exit { back },
        45..47 => Op::Unmount { back },
        47..50 => Op::Stop {
            back,
            deletes: rng.bool(),
        },
        50..52 => Op::Flows {
            back,
            flows: rng.u32(..3),
        },
        52..54 => Op::Tear { back },
        54..55 => Op::LoseListeners { back },
        number @ 55..85 => disturbance(number, rng),
        85..86 => Op::Inject { pod },
        86..87 => Op::Confuse { back },
        87..89 => Op::Twin {
            pod,
            timeout: one_of(rng, &[5, 30]),
        },
        _ => Op::Wait {
            millis: one_of(rng, &[0, 0, 1, 300, 1000, 2500, 6000, 20_000, 65_000]),
        },
    }
}

pub(super) fn schedule(seed: u64) -> Vec<Op> {
    let mut rng = Rng::with_seed(seed);
    let mut ops = Vec::new();
    if rng.u8(..4) == 0 {
        ops.push(Op::ApiServer);
    }
    if rng.u8(..4) == 0 {
        if rng.u8(..4) == 0 {
            let mode = Ztunnel::Silent;
            ops.push(Op::Ztunnel { mode });
        }
        let (pod, labelled) = (rng.usize(..NAMES.len()), rng.bool());
        ops.push(Op::RanBefore { pod, labelled });
    } else {
        ops.push(start(&mut rng));
    }
    let length = rng.usize(3..14);
    ops.extend((0..length).map(|_| op(&mut rng)));
    ops
}
