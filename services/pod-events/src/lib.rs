//! Decides which pods of the node join the mesh, and has netconfig and ztunnel-broker carry it out.
//!
//! pod-events serves the CNI plugin's calls and watches pods through its [`source`]. It owns the desired state of every
//! pod of the node and the only checkpoint, and needs no privileges towards the kernel. Start reading at [`plan`] (what
//! to do next), [`pipeline`] (how it is done) and [`task`] (in which order).

pub mod admission;
mod adoption;
mod away;
pub mod binds;
pub mod boottime;
pub mod checkpoint;
pub mod clients;
pub mod config;
pub mod decide;
pub mod drift;
mod explain;
mod in_flight;
pub mod injection;
mod joined;
pub mod metrics;
pub mod outputs;
pub mod pipeline;
pub mod plan;
pub mod pod;
pub mod redirection;
pub mod registry;
pub mod resolve;
pub mod server;
pub mod shown;
pub mod source;
pub mod sync;
pub mod task;
#[cfg(test)]
mod testing;
pub mod timeline;
mod trace;
pub mod uninstall;
pub mod ztunnels;

use std::sync::Arc;

use anyhow::Context as _;
use inpod_proto::podevents::v1::pod_events_service_server::PodEventsServiceServer;
use inpod_service::{Daemon, Readiness, Service};
use tokio::sync::watch;

use crate::{
    admission::Admission,
    adoption::Adoption,
    away::Away,
    checkpoint::Checkpoint,
    clients::Clients,
    config::Config,
    drift::Repairs,
    joined::Joined,
    metrics::{Counters, Istio, Metrics},
    outputs::Outputs,
    pipeline::{Pipeline, Revisions, Synced},
    registry::{Owners, Registry},
    server::Server,
    shown::Shown,
    source::{Health, Inventory, Source},
    sync::Sync,
    task::Shared,
    uninstall::{LeaveMode, Uninstaller},
};

pub const SERVICE: Service = Service {
    name: "pod-events",
    about: "Decides which pods of this node join the mesh, and enrolls them",
    version: env!("CARGO_PKG_VERSION"),
    keys: config::KEYS,
};

/// Runs the service until shutdown.
///
/// # Errors
///
/// If the source or the checkpoint cannot be read, or the socket cannot be bound.
pub async fn run(config: Config, daemon: Daemon) -> anyhow::Result<()> {
    let source = Source::open(&config).await?;
    let checkpoint = Checkpoint::open(&daemon.directory(SERVICE.name).join("pods"))?;
    let records = checkpoint.load().context("cannot read the checkpoint")?;
    tracing::info!(sandboxes = records.len(), "Read the checkpoint");
    let (synced_sender, synced) = watch::channel(Synced::default());
    let pipeline = Pipeline {
        clients: clients(&config, &daemon),
        checkpoint,
        synced,
        revisions: Revisions::default(),
    };
    let shared = Arc::new(Shared {
        outputs: Outputs::of(&source, &config.node_name),
        admission: Admission::new(config.max_adds),
        counters: Counters::default(),
        pipeline,
        source,
        leave_mode: LeaveMode::follow(config.leave_file.clone(), &daemon.directory(SERVICE.name)),
        config,
        shown: Shown::default(),
        repairs: Repairs::default(),
        owners: Owners::default(),
    });
    let registry = Registry::new(Arc::clone(&shared), records);
    let conditions = daemon.readiness().clone();
    if shared.config.ready_needs_ztunnel {
        conditions.require("ztunnel", "no ztunnel is up to date");
    }
    let (metrics, istio) = register_metrics(&daemon, &shared, &registry);
    let (known, readiness) = (registry.clone(), conditions.clone());
    Away::start(Arc::clone(&shared), known, readiness, metrics.clone()).await;
    let adoption = Adoption::open(daemon.directory(SERVICE.name).join("inherited"));
    let uninstaller = Uninstaller::new(&shared, &registry, &daemon, adoption.completed());
    tokio::spawn(inpod_service::vital("uninstall", uninstaller.run()));
    start_followers(&shared, &registry, &conditions, synced_sender, adoption);
    let server = Server {
        registry,
        shared,
        conditions,
        metrics,
        istio,
        version: SERVICE.version,
        instance_id: daemon.instance_id().to_owned(),
        shutdown: daemon.shutdown(),
    };
    daemon
        .server()
        .lanes(server::LANES)
        .add_service(PodEventsServiceServer::new(server))
        .serve()
        .await
}

fn clients(config: &Config, daemon: &Daemon) -> Clients {
    let [netconfig, broker] = ["netconfig", "ztunnel-broker"].map(|name| daemon.channel(name));
    Clients::new(netconfig, broker, config.capture())
}

fn register_metrics(
    daemon: &Daemon,
    shared: &Arc<Shared>,
    registry: &Registry,
) -> (Metrics, Option<Istio>) {
    let metrics = daemon.metrics().register(|metrics| {
        shared.repairs.register(metrics);
        shared.outputs.register(metrics);
        Metrics::register(metrics, registry, shared)
    });
    let istio = shared.config.istio_metrics;
    let istio = istio.then(|| daemon.metrics().register_foreign(Istio::register));
    if let Some(istio) = istio.clone() {
        tokio::spawn(istio.follow(shared.source.changes()));
    }
    if let Some(address) = shared.config.metrics_address.0 {
        let (joined, conditions) = (Joined::new(daemon), daemon.readiness().clone());
        tokio::spawn(inpod_service::metrics::serve(address, conditions, joined));
    }
    (metrics, istio)
}

/// Starts the tasks that keep netconfig and the broker in sync with this service, and this service with its source.
fn start_followers(
    shared: &Arc<Shared>,
    registry: &Registry,
    conditions: &Readiness,
    synced: watch::Sender<Synced>,
    adoption: Adoption,
) {
    let (source, clients) = (&shared.source, &shared.pipeline.clients);
    let adopted = adoption.completed();
    shared.outputs.start(shared, registry, conditions, adopted);
    let before = (adoption, source.health());
    let (known, readiness) = (registry.clone(), conditions.clone());
    let broker = Sync::start(clients.clone(), known, readiness, synced, before);
    let selector = shared.config.ztunnel_pods.clone();
    let ztunnels = ztunnels::keep_told(clients.clone(), source.clone(), selector, broker);
    tokio::spawn(inpod_service::vital("ztunnels", ztunnels));
    tokio::spawn(inpod_service::vital(
        "source",
        follow_source(source.changes(), registry.clone()),
    ));
    tokio::spawn(inpod_service::vital(
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
        let changes = now.since(&before);
        registry.wake_changed(&changes);
        registry.discover_changed(&changes);
        before = now;
    }
}
