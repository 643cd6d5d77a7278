//! What Kubernetes is told of pods: the annotation `ambient.istio.io/redirection`, and Events.
//!
//! Nothing here is waited for: what is told follows what is so.

use workload::{PodRef, Reason};

/// Tells Kubernetes of pods. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Outputs {}

/// Whether an Event tells of something that goes its way, or of something to look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Something happened as it should.
    Normal,
    /// Somebody should look.
    Warning,
}

impl Outputs {
    /// Tells nobody: pods come from a directory.
    pub fn silent() -> Self {
        Self {}
    }

    /// Whether peers are told that the pod is not redirected: the API server has accepted that, or the pod is gone.
    pub fn has_withdrawn(&self, _pod: &PodRef) -> bool {
        true
    }

    /// Tells people of something that happened to a pod. Never waits; what comes too often is left out.
    pub fn event(&self, pod: &PodRef, kind: Kind, reason: Reason, message: &str) {
        tracing::debug!(%pod, ?kind, %reason, message, "No Event: pods do not come from Kubernetes");
    }
}
