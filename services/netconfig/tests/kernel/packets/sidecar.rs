//! A sidecar's redirection with a real proxy, whose user and group the rules match.

mod checks;
mod forwarding;
mod invalid;
mod matrix;
mod mesh;
mod mutation;
mod observed;
mod process;
mod running;
mod settings;
mod takeover;
mod users;

pub(crate) use checks::more_addresses;
