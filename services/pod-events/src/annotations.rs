//! Keeps pods' annotations in sync, and sends Events of their failures.
//!
//! `desired` computes a pod's annotation, and `controller` reacts to changes.

mod controller;
pub(crate) mod desired;
mod failure_events;

use std::sync::Arc;

use inpod_service::Readiness;
use tokio::sync::watch;

use crate::{registry::Registry, task::Shared};
use controller::Controller;

/// Starts to keep annotations in sync. Pods without a known sandbox keep their annotation until `adoption_done`,
/// because the sandbox may not have been found yet.
pub(crate) fn start(
    shared: &Arc<Shared>,
    registry: &Registry,
    conditions: &Readiness,
    adoption_done: watch::Receiver<bool>,
) {
    let Some(inner) = shared.status.inner() else {
        return;
    };
    let controller = Controller::new(
        Arc::clone(inner),
        Arc::clone(shared),
        registry.clone(),
        conditions.clone(),
    );
    // The subscription starts here rather than in the controller, so that no change is missed before the controller's
    // first poll.
    let changes = shared.pod_changes.subscribe();
    tokio::spawn(inpod_service::abort_on_panic(
        "status",
        controller.run(changes, adoption_done),
    ));
}
