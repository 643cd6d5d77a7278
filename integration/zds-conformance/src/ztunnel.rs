//! The kit as the agent: what a ztunnel has to do.

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

/// Every case, in the order in which they run.
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
