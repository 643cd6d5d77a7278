//! Decides which pods of the node join the mesh, and directs netconfig and ztunnel-broker to enroll the pods.
//!
//! The service handles the CNI plugin's calls, watches pods through its [`source`], and owns every pod's desired state
//! and the only checkpoint. It needs no privileges towards the kernel. Start reading in `tasks`: at `plan` (next step),
//! `pipeline` (effects) and `task` (order).

pub mod admission;
mod adoption;
mod annotations;
pub mod binds;
pub mod boottime;
pub mod changes;
pub mod checkpoint;
pub mod clients;
pub mod config;
pub mod counters;
pub mod decide;
pub mod drift;
mod explain;
pub mod injection;
pub mod inventory;
pub mod labels;
pub mod leave_mode;
pub mod metrics;
#[cfg(test)]
mod model;
mod offline;
pub mod pod;
#[cfg(test)]
mod pods;
pub mod redirection;
pub mod server;
pub mod source;
pub mod startup_taint;
pub mod status;
pub mod sync;
pub mod tasks;
#[cfg(test)]
mod testing;
pub mod timeline;
mod trace;
pub mod uninstall;
mod unserved;
pub mod ztunnels;

use std::sync::Arc;

use anyhow::Context as _;
use inpod_proto::podevents::v1::pod_events_service_server::PodEventsServiceServer;
use inpod_service::{Daemon, Readiness, Service, metrics::AggregatedMetrics};
use tokio::sync::watch;

use crate::{
    adoption::Adoption,
    checkpoint::Checkpoint,
    clients::Clients,
    config::Config,
    inventory::Inventory,
    leave_mode::LeaveMode,
    metrics::Metrics,
    offline::PluginState,
    server::Server,
    source::{Health, Source},
    status::StatusReporter,
    sync::Sync,
    tasks::{Registry, Shared, Synced},
    uninstall::Uninstaller,
    unserved::track_unserved,
};

pub const SERVICE: Service = Service {
    name: "pod-events",
    about: "Decides which pods of this node join the mesh, and enrolls them",
    version: inpod_service::VERSION,
    keys: config::KEYS,
};

/// Runs the service until shutdown.
///
/// # Errors
///
/// If the source or the checkpoint cannot be read, or the socket cannot be bound.
pub async fn run(config: Config, daemon: Daemon) -> anyhow::Result<()> {
    let source = Source::open(&config).await?;
    let status = StatusReporter::for_source(&source, &config.node_name);
    let clients = clients(&config, &daemon);
    let leave_mode = LeaveMode::follow(config.leave_file.clone(), &daemon.directory(SERVICE.name));
    let checkpoint = Checkpoint::open(&daemon.directory(SERVICE.name).join("pods"))?;
    let records = checkpoint.load().context("cannot read the checkpoint")?;
    tracing::info!(sandboxes = records.len(), "Read the checkpoint");
    let (synced_sender, synced) = watch::channel(Synced::default());
    let shared = Arc::new(Shared::new(
        config, source, status, leave_mode, clients, checkpoint, synced,
    ));
    let registry = Registry::new(Arc::clone(&shared), records);
    let conditions = daemon.readiness().clone();
    if shared.config.ready_needs_ztunnel {
        conditions.require("ztunnel", "no ztunnel is up to date");
    }
    let metrics = register_metrics(&daemon, &shared, &registry);
    let (known, readiness) = (registry.clone(), conditions.clone());
    PluginState::start(Arc::clone(&shared), known, readiness, metrics.clone()).await;
    let adoption = Adoption::open(daemon.directory(SERVICE.name).join("inherited"));
    let uninstaller = Uninstaller::new(&shared, &registry, &daemon, adoption.completed());
    tokio::spawn(inpod_service::abort_on_panic(
        "uninstall",
        uninstaller.run(),
    ));
    start_followers(&shared, &registry, &conditions, synced_sender, adoption);
    startup_taint::start(&shared, &daemon);
    let server = Server {
        registry,
        shared,
        conditions,
        metrics,
        version: SERVICE.version,
        instance_id: daemon.instance_id().to_owned(),
        shutdown: daemon.shutdown(),
    };
    daemon
        .server()
        .concurrency_groups(server::CONCURRENCY_GROUPS)
        .add_service(PodEventsServiceServer::new(server))
        .serve()
        .await
}

fn clients(config: &Config, daemon: &Daemon) -> Clients {
    let [netconfig, broker] = ["netconfig", "ztunnel-broker"].map(|name| daemon.channel(name));
    Clients::new(netconfig, broker, config.capture())
}

fn register_metrics(daemon: &Daemon, shared: &Arc<Shared>, registry: &Registry) -> Metrics {
    let metrics = daemon.metrics().register(|metrics| {
        shared.repairs.register(metrics);
        shared.status.register(metrics);
        Metrics::register(metrics, registry, shared)
    });
    if let Some(address) = shared.config.metrics_address {
        let (own, conditions) = (daemon.metrics().clone(), daemon.readiness().clone());
        let all = AggregatedMetrics::new(SERVICE.name, own, daemon.run_dir());
        tokio::spawn(inpod_service::metrics::serve(address, conditions, all));
    }
    metrics
}

/// Starts the tasks that sync pod-events with its source, and the other services with pod-events.
fn start_followers(
    shared: &Arc<Shared>,
    registry: &Registry,
    conditions: &Readiness,
    synced: watch::Sender<Synced>,
    adoption: Adoption,
) {
    let (source, clients) = (&shared.source, shared.clients());
    let adopted = adoption.completed();
    annotations::start(shared, registry, conditions, adopted);
    let before = (adoption, source.health());
    let (known, readiness) = (registry.clone(), conditions.clone());
    let (broker, announcements) = Sync::start(
        clients.clone(),
        known,
        shared.status.clone(),
        readiness,
        synced,
        before,
    );
    let unserved = track_unserved(
        clients.clone(),
        registry.clone(),
        conditions.clone(),
        announcements,
    );
    tokio::spawn(inpod_service::abort_on_panic("unserved", unserved));
    let selector = shared.config.ztunnel_pods.clone();
    let ztunnels = ztunnels::sync_ztunnels(clients.clone(), source.clone(), selector, broker);
    tokio::spawn(inpod_service::abort_on_panic("ztunnels", ztunnels));
    tokio::spawn(inpod_service::abort_on_panic(
        "source",
        follow_source(source.changes(), registry.clone()),
    ));
    tokio::spawn(inpod_service::abort_on_panic(
        "health",
        follow_health(source.health(), conditions.clone()),
    ));
}

async fn follow_health(mut health: watch::Receiver<Health>, conditions: Readiness) {
    loop {
        let now = health.borrow_and_update().clone();
        let first = || Err("the pods of this node have not been listed yet".to_owned());
        conditions.set("pods", now.unwrap_or_else(first));
        if health.changed().await.is_err() {
            // The source ended; its last state stays.
            return;
        }
    }
}

async fn follow_source(mut changes: watch::Receiver<Arc<Inventory>>, registry: Registry) {
    let mut before = Arc::clone(&changes.borrow_and_update());
    while changes.changed().await.is_ok() {
        let now = Arc::clone(&changes.borrow_and_update());
        let changes = now.changes_since(&before);
        registry.evaluate(&changes);
        before = now;
    }
}
