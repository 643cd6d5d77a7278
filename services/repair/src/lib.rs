//! Finds the pods of this node that should be redirected and are not, and does the kindest thing that helps.
//!
//! There are two signs. The one is a pod's status: the init container that looks for redirection has failed ([`broken`]).
//! The other is what pod-events says: the pod is to be in the mesh, and is not ([`word`]). [`diagnosis`] puts both
//! together; [`ledger`] remembers since when a pod has been so and says what is to be done, in the order of kindness:
//! nothing, as long as pod-events puts the rules into the running pod; then a label; then a deletion. Both are pure. What
//! is to be done, `acts` does. This service has no right on the kernel: who repairs in place is pod-events.
//!
//! Everything is decided from what is seen now; a restart loses how long something has lasted, and nothing else.

mod actions;
pub mod config;
mod controller;
pub mod detect;
pub mod diagnosis;
pub mod enrollment_status;
mod enrollments;
pub mod error;
pub mod escalation;
mod events;
pub mod limit;
pub mod metrics;
pub mod pods;

use std::{path::Path, sync::Arc};

use inpod_kube::ReachError;
use inpod_service::{Daemon, Service};
use kube::{Client, client::ClientBuilder};

use crate::{
    config::Config, controller::Controller, enrollments::Enrollments, metrics::Metrics, pods::Pods,
};

/// What this service is.
pub const SERVICE: Service = Service {
    name: "repair",
    about: "Finds pods of this node that should be redirected and are not, and takes the least disruptive action: \
            waits for pod-events to redirect them, labels them, deletes them",
    version: env!("CARGO_PKG_VERSION"),
    keys: config::KEYS,
};

/// Runs the service until it is to stop.
///
/// # Errors
///
/// When it cannot be known how the API server is reached, or the socket cannot be had.
pub async fn run(config: Config, daemon: Daemon) -> anyhow::Result<()> {
    // It keeps nothing but its socket.
    daemon.forget(true);
    let client = client(config.kubeconfig()).await?;
    let metrics = daemon.metrics().register(Metrics::register);
    daemon.readiness().require(
        pods::CONDITION,
        "the pods of this node have not been listed yet",
    );
    let config = Arc::new(config);
    let pods = Pods::start(client.clone(), &config, daemon.readiness().clone());
    let enrollments = Enrollments::start(daemon.channel("pod-events"), daemon.readiness().clone());
    let controller = Controller::new(client, config, metrics, pods, enrollments);
    let shutdown = daemon.shutdown();
    let work = async {
        tokio::select! {
            never = controller.run() => match never {},
            // What is under way is dropped: the API server has done it or not, and the next run sees which.
            () = shutdown.requested() => Ok(()),
        }
    };
    tokio::try_join!(daemon.server().serve(), work).map(|((), ())| ())
}

/// A client, without asking anybody yet.
async fn client(kubeconfig: Option<&Path>) -> Result<Client, ReachError> {
    let config = inpod_kube::config(kubeconfig).await?;
    let builder = ClientBuilder::try_from(config).map_err(ReachError::client(kubeconfig))?;
    Ok(builder.build())
}
