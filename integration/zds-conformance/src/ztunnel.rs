//! The cases for ztunnels, in which the kit plays the agent.

pub mod bench;
mod connection;
mod listeners;
mod load;
pub mod network;
mod pending;
mod pods;
mod refused;
mod requests;
pub mod session;
mod snapshot;
mod traffic;

use crate::case::{Listed, Profile};
use bench::Bench;

pub fn cases() -> Vec<Listed<Bench>> {
    let control = [
        connection::CASES,
        requests::CASES,
        pods::CASES,
        snapshot::CASES,
        pending::CASES,
        refused::CASES,
        load::CASES,
    ];
    let data = [listeners::CASES, traffic::CASES];
    let control = Listed::all(Profile::Control, control.into_iter().flatten());
    let data = Listed::all(Profile::Data, data.into_iter().flatten());
    let thorough = Listed::all(Profile::Control, connection::THOROUGH);
    let thorough = thorough.map(|listed| Listed {
        is_thorough: true,
        ..listed
    });
    control.chain(data).chain(thorough).collect()
}
