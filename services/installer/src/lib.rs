//! Puts the plugin and its place in the CNI chain on the node, keeps them there, and takes them away without a trace.
//!
//! [`plan`] says what each file of the CNI directory is to be, [`leave`] what it is to be when inpod goes; both are pure.
//! [`record`] is what leaving goes by, written before the first change. [`steps`] and [`files`] carry a plan out, one
//! rename at a time; [`binary`] puts the plugin there; [`reconcile`] does all of it, again whenever something changed.

pub mod backoff;
pub mod binary;
mod command;
pub mod config;
pub mod entry;
pub mod error;
pub mod files;
mod kill_switch;
pub mod known_conflicts;
pub mod metrics;
pub mod mode;
pub mod plan;
pub mod reconcile;
pub mod record;
pub mod removal;
mod schedule;
pub mod steps;
mod uninstall;
mod watcher;

use std::process::ExitCode;

use crate::config::Config;

/// What this service is.
pub const SERVICE: inpod_service::Service = inpod_service::Service {
    name: "installer",
    about: "Puts the plugin and its place in the CNI chain on the node, keeps them there, and takes them away without \
            a trace. Commands: disable, enable (the kill switch of the plugin), uninstall, handover (leave now, by hand); \
            each takes the settings below.",
    version: env!("CARGO_PKG_VERSION"),
    keys: config::KEYS,
};

/// Runs the service, or the command that the command line begins with.
pub fn main() -> ExitCode {
    let mut arguments: Vec<_> = std::env::args_os().collect();
    let command = arguments.get(1).and_then(|word| word.to_str());
    match command.and_then(command::Command::parse) {
        Some(command) => {
            arguments.remove(1);
            command::main(command, &arguments)
        }
        None => inpod_service::main(&SERVICE, run),
    }
}

/// Keeps the plugin and the chain as they are to be until the process is to stop. Stopping changes nothing on the host.
///
/// # Errors
///
/// When another installer is at work on the node, the record of an earlier one cannot be read, or the socket cannot be
/// had.
pub async fn run(config: Config, daemon: inpod_service::Daemon) -> anyhow::Result<()> {
    for condition in ["binary", "chain"] {
        daemon.readiness().require(condition, "not looked at yet");
    }
    let metrics = metrics::Metrics::default();
    daemon
        .metrics()
        .register(|registry| metrics.register(registry));
    let shutdown = daemon.shutdown();
    let served = daemon.server().serve();
    let work = async {
        tokio::select! {
            done = schedule::run(config, &daemon, metrics) => done,
            () = shutdown.requested() => Ok(()),
        }
    };
    // The socket is served until the process is to stop, or has left.
    tokio::pin!(served, work);
    tokio::select! {
        done = &mut work => {
            done?;
            if daemon.shutdown().is_requested() { served.await } else { Ok(()) }
        }
        done = &mut served => done,
    }
}
