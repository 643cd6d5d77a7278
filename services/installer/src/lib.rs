//! Installs the plugin, adds inpod to the node's CNI chain, keeps both in place, and finally removes both without a
//! trace.
//!
//! [`plan`] and [`removal`] compute the desired files with and without inpod, without I/O. [`record`] stores the facts
//! that the removal needs before any change. [`steps`] and [`files`] apply a plan with one rename per file, [`binary`]
//! installs the plugin, and [`reconcile`] runs all of these after every change on the host.

pub mod backoff;
pub mod binary;
mod command;
pub mod config;
mod directory;
pub mod entry;
pub mod error;
pub mod files;
mod kill_switch;
pub mod known_conflicts;
mod list;
mod malformed;
mod meta;
pub mod metrics;
pub mod mode;
pub mod plan;
pub mod reconcile;
pub mod record;
pub mod removal;
mod runtimes;
mod schedule;
pub mod steps;
mod uninstall;
mod volatile;
mod watcher;

use std::process::ExitCode;

pub use crate::{
    directory::{Directory, NetworkFile, is_loaded},
    list::{Conflist, Plugin},
    malformed::{Malformed, ReadError},
    runtimes::Runtime,
};

use crate::config::Config;

/// The name of inpod's executable, which is the `type` in a conflist.
pub const INPOD_CNI: &str = "inpod-cni";

/// The `type` of Istio's plugin, which inpod replaces.
pub const ISTIO_CNI: &str = "istio-cni";

pub const SERVICE: inpod_service::Service = inpod_service::Service {
    name: "installer",
    about: "Installs the plugin, adds inpod to the node's CNI chain, keeps both in\n\
            place, and removes them without a trace.\n\n\
            Commands, each with the options below:\n  \
            disable, enable      set or remove the kill switch of the plugin\n  \
            uninstall, handover  leave the node now",
    version: inpod_service::VERSION,
    keys: config::KEYS,
};

/// Runs the service, or a command if the first argument names one.
pub fn main() -> ExitCode {
    let mut arguments: Vec<_> = std::env::args_os().collect();
    let command = arguments.get(1).and_then(|argument| argument.to_str());
    match command.and_then(command::Command::parse) {
        Some(command) => {
            arguments.remove(1);
            command::main(command, &arguments)
        }
        None => inpod_service::main(&SERVICE, run),
    }
}

/// Runs the service until shutdown. A shutdown changes nothing on the host.
///
/// # Errors
///
/// Fails if another installer runs, if the record cannot be read, or if the socket is not available.
pub async fn run(config: Config, daemon: inpod_service::Daemon) -> anyhow::Result<()> {
    for condition in ["binary", "chain"] {
        daemon.readiness().require(condition, "not checked yet");
    }
    let metrics = daemon.metrics().register(metrics::Metrics::register);
    let shutdown = daemon.shutdown();
    let served = daemon.server().serve();
    let work = async {
        tokio::select! {
            done = schedule::run(config, &daemon, metrics) => done,
            () = shutdown.requested() => Ok(()),
        }
    };
    // The socket is served until shutdown, or until inpod has left the node.
    tokio::pin!(served, work);
    tokio::select! {
        done = &mut work => {
            done?;
            if daemon.shutdown().is_requested() { served.await } else { Ok(()) }
        }
        done = &mut served => done,
    }
}
