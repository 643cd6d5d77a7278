//! Claims pods' network namespaces, writes their redirection and reads it back. The only process that enters one.
//!
//! [`apply`] is the heart: what [`rules`] says as data becomes so in the kernel, is read back, or is taken away. A
//! caller names a netns by the claim that it holds; this process alone resolves a path. It holds no credential,
//! keeps no state of its own, and acts on nothing but a claimed netns: never on the node's, but for [`probe_set`].

pub mod apply;
mod backend;
mod claims;
mod config;
mod conntrack;
pub mod discover;
pub mod error;
mod family;
pub mod inspect;
mod iptables;
pub mod kernel_version;
mod marks;
mod metrics;
mod netlink;
mod netns_session;
mod netns_sock;
mod nftables;
mod notifications;
mod plan;
mod preflight;
pub mod probes;
pub mod radar;
mod routes;
pub mod rules;
pub mod selftest;
mod server;
mod sysctl;
mod uninstall;
mod watch;

pub use backend::{
    Backend, BackendError,
    detect::{BackendSetting, InvalidBackendSetting},
};
pub use config::Config;
pub use family::Family;
pub use iptables::{ProgramError, Programs, Variant, run_program, script as iptables_script};
pub use marks::Mark;
pub use netns_session::ReachError;
pub use sysctl::Sysctls;

use std::sync::Arc;

use anyhow::Context as _;
use inpod_proto::netconfig::v1::netconfig_service_server::NetconfigServiceServer;
use inpod_service::{Daemon, vital};
use tokio::task::JoinSet;

use crate::{
    apply::Writer,
    backend::detect::{SelectedBackend, select_backend},
    claims::Claims,
    metrics::DriftMetrics,
    notifications::{Queue, Reader, Subscriptions},
    probes::ProbeSet,
    server::Handler,
};

/// What this service is.
pub const SERVICE: inpod_service::Service = inpod_service::Service {
    name: "netconfig",
    about: "Claims pods' network namespaces, writes their redirection and reads it back",
    version: env!("CARGO_PKG_VERSION"),
    keys: config::KEYS,
};

/// Whether there is something to write rules with. Holds readiness up.
const BACKEND: &str = "backend";

/// Serves until the process is to stop. Claims end with it; rules stay.
///
/// # Errors
///
/// When the kernel is too old, or a socket cannot be had.
pub async fn run(config: Config, daemon: Daemon) -> anyhow::Result<()> {
    kernel_version::check()?;
    let probes = config.probes();
    let writer = select_writer(config.backend, &daemon).await?;
    let queue = Arc::new(Queue::new(config.verify));
    let claims = Arc::new(Claims::new(Arc::clone(&queue)));
    let counts = daemon.metrics().register(DriftMetrics::register);
    let reader = Reader::new(Arc::clone(&claims), Arc::clone(&writer), counts.clone());
    let options = notifications::Options {
        shared: true,
        buffer_bytes: config.event_buffer_bytes,
    };
    let subscriptions = Subscriptions::open(options, Arc::clone(&queue), counts);
    daemon
        .readiness()
        .set("shared-events", subscriptions.are_shared());
    let broker = netns_sock::listen(&daemon)?;
    let probe_sources = probes.sources();
    let backend = probes::programs::backend_kind_for(writer.backend(), &writer.programs);
    let probe_set = ProbeSet::start(probes.clone(), backend, daemon.readiness().clone());
    let probe_set = Arc::new(probe_set.context("cannot open a netlink socket")?);
    let _guard = probe_set
        .start_reconciler()
        .context("cannot start a thread")?;
    let mut tasks = JoinSet::new();
    tasks.spawn(vital(
        "notifications",
        notifications::run(queue, reader.clone(), subscriptions),
    ));
    let sweep = claims::sweep::run(Arc::clone(&claims), config.sweep);
    tasks.spawn(vital("sweep", sweep));
    let release_task = probes::release::run(Arc::clone(&probe_set), Arc::clone(&claims));
    tasks.spawn(vital("probe-set", release_task));
    let netns_sock_task = netns_sock::serve(broker, claims, daemon.clone());
    tasks.spawn(vital("netns.sock", netns_sock_task));
    let recheck = preflight::start(&mut tasks, &writer, probes, daemon.readiness());
    let handler = Handler::new(
        reader,
        config.netns_roots,
        writer,
        probe_sources,
        probe_set,
        recheck,
        &daemon,
    );
    let server = daemon.server();
    let server = server.add_service(NetconfigServiceServer::new(handler));
    server.serve().await?;
    // The broker's socket is served until then.
    tasks.shutdown().await;
    if daemon.forgets() {
        netns_sock::remove(&daemon)?;
    }
    Ok(())
}

/// What rules are written with. Whether that can be used is told.
async fn select_writer(setting: BackendSetting, daemon: &Daemon) -> anyhow::Result<Arc<Writer>> {
    let directory = daemon.directory(SERVICE.name);
    let selection = tokio::task::spawn_blocking(move || select_backend(setting, &directory));
    let SelectedBackend { writer, usable } = selection.await?;
    daemon.readiness().require(BACKEND, "not checked yet");
    daemon.readiness().set(BACKEND, usable);
    Ok(Arc::new(writer))
}
