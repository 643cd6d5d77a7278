//! The cases for ztunnels, in which the kit plays the agent.

pub mod bench;
mod connection;
mod load;
mod pending;
mod pods;
mod refused;
mod requests;
pub mod session;
mod snapshot;

use crate::case::Case;
use bench::Bench;

pub fn cases() -> Vec<&'static Case<Bench>> {
    let all = [
        connection::CASES,
        requests::CASES,
        pods::CASES,
        snapshot::CASES,
        pending::CASES,
        refused::CASES,
        load::CASES,
    ];
    all.into_iter().flatten().collect()
}
