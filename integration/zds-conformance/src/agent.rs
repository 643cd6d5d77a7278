//! The cases for agents, in which the kit plays ztunnels.

pub mod acknowledging;
mod answers;
pub mod bench;
pub mod driver;
mod exec;
mod hello;
mod inpod;
mod load;
pub mod peer;
mod refusals;
mod sessions;
mod snapshot;
mod workloads;

use crate::case::Case;
use bench::Bench;

pub fn cases() -> Vec<&'static Case<Bench>> {
    let all = [
        hello::CASES,
        snapshot::CASES,
        workloads::CASES,
        answers::CASES,
        refusals::CASES,
        sessions::CASES,
        load::CASES,
    ];
    all.into_iter().flatten().collect()
}
