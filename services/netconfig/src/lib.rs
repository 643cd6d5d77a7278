//! Makes a network namespace's redirection so, and proves it. The only process that enters one.
//!
//! [`apply`] is the heart: what [`rules`] says as data becomes so in the kernel, is read back, or is taken away. A
//! caller names a netns by the claim that it holds; this process alone resolves a path. It holds no credential,
//! keeps no state of its own, and acts on nothing but a claimed netns: never on the node's.

pub mod apply;
mod backend;
mod claims;
mod config;
mod conntrack;
pub mod discover;
pub mod error;
mod family;
pub mod floor;
pub mod inspect;
mod iptables;
mod link;
mod marks;
mod metrics;
mod netlink;
mod netns_sock;
mod nftables;
mod plan;
pub mod radar;
mod routes;
pub mod rules;
pub mod selftest;
mod server;
mod sysctl;
mod watch;

pub use backend::{Backend, BackendError};
pub use config::Config;
pub use family::Family;
pub use iptables::{ProgramError, Programs, Variant};
pub use link::ReachError;
pub use marks::Mark;

use std::sync::Arc;

use daemon::Daemon;
use inpod_proto::netconfig::v1::netconfig_service_server::NetconfigServiceServer;

use crate::{apply::Writer, claims::Claims, server::Handler};

/// What this service is.
pub const SERVICE: daemon::Service = daemon::Service {
    name: "netconfig",
    about: "Makes a network namespace's redirection so, and proves it",
    version: env!("CARGO_PKG_VERSION"),
    keys: config::KEYS,
};

/// Serves until the process is to stop. Claims end with it; rules stay.
///
/// # Errors
///
/// When the kernel is too old, or a socket cannot be had.
pub async fn run(config: Config, daemon: Daemon) -> anyhow::Result<()> {
    floor::check()?;
    let Config { netns_roots, sweep } = config;
    let claims = Arc::new(Claims::default());
    let broker = netns_sock::listen(&daemon)?;
    let sweeper = tokio::spawn(claims::sweep::run(Arc::clone(&claims), sweep));
    let broker = tokio::spawn(netns_sock::serve(
        broker,
        Arc::clone(&claims),
        daemon.clone(),
    ));
    let handler = Handler::new(claims, netns_roots, Writer::default(), Vec::new(), &daemon);
    let result = daemon
        .server()
        .add_service(NetconfigServiceServer::new(handler))
        .serve()
        .await;
    sweeper.abort();
    broker.abort();
    result
}
