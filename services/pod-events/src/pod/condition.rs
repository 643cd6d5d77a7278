//! The condition `inpod.io/InMesh` as the API server shows a pod.

use std::fmt;

use inpod_types::keys;
use k8s_openapi::api::core::v1 as k8s;

/// The part of the condition by which two conditions are compared. Messages may name ports or processes that change
/// often, and each write costs a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShownCondition {
    pub status: String,
    pub reason: String,
}

impl fmt::Display for ShownCondition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.status, self.reason)
    }
}

impl ShownCondition {
    pub(super) fn of(status: &k8s::PodStatus) -> Option<Self> {
        let mut conditions = status.conditions.iter().flatten();
        let condition = conditions.find(|condition| condition.type_ == keys::IN_MESH)?;
        Some(Self {
            status: condition.status.clone(),
            reason: condition.reason.clone().unwrap_or_default(),
        })
    }
}

/// Returns whether the pod is Ready only while the condition is true.
pub(super) fn is_gated(spec: &k8s::PodSpec) -> bool {
    let mut gates = spec.readiness_gates.iter().flatten();
    gates.any(|gate| gate.condition_type == keys::IN_MESH)
}
