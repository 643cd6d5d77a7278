//! Finds pods of this node that should be redirected but are not, and takes the least disruptive action that helps.
//!
//! Two signs show missing redirection: a failed init container that checks for redirection ([`detect`]), and a pod that
//! pod-events reports as desired but not redirected ([`enrollment_status`]). [`diagnosis`] combines both signs.
//! [`escalation`] decides by the time for which redirection has been missing: no action while pod-events applies the
//! rules to the running pod, then a label, then a deletion. All of these are pure functions; `actions` sends the
//! requests. This service has no privileges in the kernel; only pod-events repairs in place.
//!
//! [`away`] decides about the pods' condition `inpod.io/InMesh` while pod-events does not answer.
//!
//! Decisions follow from the current state of the pods. A restart loses only how long redirection has been missing, and
//! how long pod-events has been away.

mod actions;
pub mod away;
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
#[cfg(test)]
mod testing;

use std::{path::Path, sync::Arc};

use inpod_kube::ClientError;
use inpod_service::{Daemon, Service};
use kube::{Client, client::ClientBuilder};

use crate::{config::Config, controller::Controller, metrics::Metrics};

pub const SERVICE: Service = Service {
    name: "repair",
    about: "Finds pods of this node that should be redirected and are not, and takes the least disruptive action: \
            waits for pod-events to redirect them, labels them, deletes them",
    version: inpod_service::VERSION,
    keys: config::KEYS,
};

/// Runs the service until shutdown.
///
/// # Errors
///
/// Fails if the configuration for the API server cannot be read, or if the socket cannot be created.
pub async fn run(config: Config, daemon: Daemon) -> anyhow::Result<()> {
    // The socket is the only state of this service, so the state can be removed.
    daemon.remove_state_on_exit(true);
    let client = client(config.kubeconfig()).await?;
    let metrics = daemon.metrics().register(Metrics::register);
    daemon.readiness().require(
        pods::CONDITION,
        "the pods of this node have not been listed yet",
    );
    let config = Arc::new(config);
    let pods = pods::start(client.clone(), &config, daemon.readiness().clone());
    let enrollments = enrollments::start(daemon.channel("pod-events"), daemon.readiness().clone());
    let controller = Controller::new(client, config, metrics, pods, enrollments);
    let shutdown = daemon.shutdown();
    let work = async {
        tokio::select! {
            never = controller.run() => match never {},
            // A shutdown drops the requests in flight: the next run sees whether the API server has executed them.
            () = shutdown.requested() => Ok(()),
        }
    };
    tokio::try_join!(daemon.server().serve(), work).map(|((), ())| ())
}

/// Creates a client of the API server, without connecting yet.
async fn client(kubeconfig: Option<&Path>) -> Result<Client, ClientError> {
    let config = inpod_kube::client_config(kubeconfig).await?;
    let builder =
        ClientBuilder::try_from(config).map_err(ClientError::from_kubeconfig(kubeconfig))?;
    Ok(builder.build())
}
