//! Random schedules of operations.

use fastrand::Rng;

/// There are few containers, so that operations often concern the same container.
pub(super) const CONTAINERS: u8 = 4;
pub(super) const PODS: u8 = 3;
pub(super) const ZTUNNELS: usize = 2;

#[derive(Clone, Debug)]
pub(super) enum Op {
    Set {
        named: Vec<Given>,
        behind: u64,
    },
    Add {
        it: Given,
        behind: u64,
    },
    Remove {
        container: u8,
        behind: u64,
    },
    Conclude(usize),
    Abandon(usize),
    Fetch(u8),
    Connect(usize),
    Hello(usize),
    Disconnect(usize),
    Next(usize),
    Ack(usize),
    /// Callers add without a pause while the ztunnel answers.
    Load(usize),
    Refuse(usize),
    Misread(usize),
    Restart,
    Wait(u64),
}

#[derive(Clone, Debug)]
pub(super) struct Given {
    pub(super) container: u8,
    pub(super) pod: u8,
    pub(super) netns: bool,
    pub(super) name: u8,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Nature {
    /// A reconnecting ztunnel is a new process if set; otherwise the ztunnel still serves its pods.
    pub(super) fresh: bool,
    /// The pod whose Add makes every ztunnel disconnect.
    pub(super) poison: Option<u8>,
}

#[derive(Clone, Debug)]
pub(super) struct Schedule {
    pub(super) nature: Nature,
    pub(super) ops: Vec<Op>,
}

impl Schedule {
    pub(super) fn of(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let nature = Nature {
            fresh: rng.bool(),
            poison: (rng.u8(..4) == 0).then(|| rng.u8(..PODS)),
        };
        let mut ops = Vec::new();
        if rng.u8(..4) > 0 {
            ops.extend(beginning(&mut rng));
        }
        let length = rng.usize(..120);
        ops.extend((0..length).map(|_| op(&mut rng)));
        Self { nature, ops }
    }
}

/// Returns operations for a known set and connected ztunnels, so that schedules get beyond the start.
fn beginning(rng: &mut Rng) -> Vec<Op> {
    let named = (0..rng.usize(..4)).map(|_| given(rng)).collect();
    let set = Op::Set { named, behind: 0 };
    let mut ops = vec![set];
    ops.extend((0..ZTUNNELS).flat_map(|n| [Op::Connect(n), Op::Hello(n)]));
    ops
}

fn op(rng: &mut Rng) -> Op {
    let n = rng.usize(..ZTUNNELS);
    if rng.u8(..200) == 0 {
        return Op::Restart;
    }
    match rng.u8(..37) {
        0 => Op::Set {
            named: (0..rng.usize(..4)).map(|_| given(rng)).collect(),
            behind: behind(rng),
        },
        1..=3 => Op::Add {
            it: given(rng),
            behind: behind(rng),
        },
        4..=5 => Op::Remove {
            container: rng.u8(..CONTAINERS),
            behind: behind(rng),
        },
        6 => Op::Conclude(rng.usize(..4)),
        7 => Op::Abandon(rng.usize(..4)),
        8 => Op::Fetch(rng.u8(..CONTAINERS)),
        9 => Op::Connect(n),
        10..=11 => Op::Hello(n),
        12 => Op::Disconnect(n),
        13..=22 => Op::Next(n),
        23..=30 => Op::Ack(n),
        31..=32 => Op::Refuse(n),
        33 => Op::Misread(n),
        34 => Op::Load(n),
        _ => Op::Wait(rng.u64(1..8)),
    }
}

fn given(rng: &mut Rng) -> Given {
    Given {
        container: rng.u8(..CONTAINERS),
        pod: rng.u8(..PODS),
        netns: rng.bool(),
        name: rng.u8(..2),
    }
}

/// Most revisions are the newest; some are older.
fn behind(rng: &mut Rng) -> u64 {
    if rng.u8(..5) == 0 { rng.u64(1..4) } else { 0 }
}
