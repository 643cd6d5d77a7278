//! Hands each pod's network namespace to the node's ztunnel over ZDS.
//!
//! The broker holds the desired set in memory and keeps every connected ztunnel in sync with the set. It stores nothing
//! on disk, opens no path and makes no decisions about pods. Three modules work without I/O: [`session`] holds the
//! protocol state of a single ztunnel, [`desired`] the desired set, and [`state`] both together. [`hub`] shares them
//! between tasks, and [`zds`] and [`server`] serve the two sockets.

pub mod admission;
pub mod config;
pub mod descriptors;
pub mod desired;
pub mod host_pid;
pub mod hub;
pub mod message;
pub mod metrics;
pub mod nack;
mod netns_connection;
pub mod next_message;
pub mod outcome;
pub mod peer;
pub mod quarantine;
pub mod queue;
pub mod records;
pub mod server;
pub mod session;
pub mod state;
mod view;
pub mod waits;
pub mod zds;

#[cfg(test)]
mod fixture;

use std::sync::Arc;

use anyhow::Context as _;
use inpod_proto::ztunnelbroker::v1::ztunnel_broker_service_server::ZtunnelBrokerServiceServer;
use inpod_service::uds;
use nix::sys::socket::SockType;

use crate::{config::Config, descriptors::Descriptors, hub::Hub, server::Handler};

pub const SERVICE: inpod_service::Service = inpod_service::Service {
    name: "ztunnel-broker",
    about: "Hands each pod's network namespace to the node's ztunnel over ZDS",
    version: inpod_service::VERSION,
    keys: config::KEYS,
};

/// Serves callers and ztunnels until shutdown.
///
/// # Errors
///
/// If a socket cannot be created, or if the settings require the PIDs of peers and the broker cannot see the PIDs.
pub async fn run(config: Config, daemon: inpod_service::Daemon) -> anyhow::Result<()> {
    let policy = config.policy();
    if policy.needs_host_pid() {
        host_pid::check()?;
    }
    let descriptors = Descriptors::new(daemon.directory("netns").join("netns.sock"));
    let hub = Hub::new(
        descriptors,
        config.ack_timeout(),
        daemon.readiness().clone(),
    );
    daemon
        .metrics()
        .register(|registry| metrics::register(registry, &hub));
    let listener = zds::listen(&config.zds_socket).context("cannot serve ZDS")?;
    let handler = Handler::new(
        Arc::clone(&hub),
        daemon.instance_id(),
        config.undo_reserve(),
        daemon.shutdown(),
    );
    let server = daemon
        .server()
        .add_service(ZtunnelBrokerServiceServer::new(handler));
    let ztunnels = async {
        tokio::select! {
            never = admission::serve(listener, Arc::clone(&hub), policy) => match never {},
            never = hub.fetch_missing() => match never {},
            () = daemon.shutdown().requested() => {}
        }
        // Ztunnels keep serving their pods. Waiting callers are answered to keep the drain short.
        hub.state().stop();
        Ok(())
    };
    tokio::try_join!(server.serve(), ztunnels)?;
    // Without pods, a successor needs neither the socket nor the recorded state.
    let state = hub.state();
    if state.desired().is_seeded() && state.desired().entries().next().is_none() {
        daemon.remove_state_on_exit(true);
        uds::remove_socket(&config.zds_socket, SockType::SeqPacket)?;
    }
    Ok(())
}
