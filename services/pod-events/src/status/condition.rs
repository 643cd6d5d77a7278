//! The pod condition `inpod.io/InMesh`, by which Services, readiness gates and users see whether a pod is proven to be in
//! the mesh.

use inpod_types::{Failure, Reason, keys};
use k8s_openapi::{api::core::v1 as k8s, apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use serde_json::{Value, json};

use crate::pod::ShownCondition;

/// The longest message, so that a failure with a long list does not fill the pod's status.
const MAX_MESSAGE_BYTES: usize = 512;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Condition {
    shown: ShownCondition,
    message: String,
}

impl Condition {
    pub(crate) fn met(reason: Reason, message: &str) -> Self {
        Self::new("True", reason, message)
    }

    pub(crate) fn failed(failure: &Failure) -> Self {
        Self::unmet(failure.reason, &failure.message)
    }

    pub(crate) fn unmet(reason: Reason, message: &str) -> Self {
        Self::new("False", reason, &format!("{message}. {}", reason.remedy()))
    }

    fn new(status: &str, reason: Reason, message: &str) -> Self {
        let end = message.floor_char_boundary(MAX_MESSAGE_BYTES);
        Self {
            shown: ShownCondition {
                status: status.to_owned(),
                // Kubernetes writes reasons in upper camel case, as the variants are named.
                reason: format!("{reason:?}"),
            },
            message: message.get(..end).unwrap_or(message).to_owned(),
        }
    }
}

/// The desired condition of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum DesiredCondition {
    Set(Condition),
    Absent,
}

impl DesiredCondition {
    pub(crate) fn shown(&self) -> Option<&ShownCondition> {
        match self {
            Self::Set(condition) => Some(&condition.shown),
            Self::Absent => None,
        }
    }

    /// Returns the entry of a strategic merge patch, which merges conditions by type. If the status stays, so does the
    /// time of the last transition.
    pub(crate) fn to_patch(&self, before: Option<&ShownCondition>, now: Timestamp) -> Value {
        let Self::Set(Condition { shown, message }) = self else {
            return json!({"$patch": "delete", "type": keys::IN_MESH});
        };
        let is_transition = before.is_none_or(|before| before.status != shown.status);
        json!(k8s::PodCondition {
            type_: keys::IN_MESH.to_owned(),
            status: shown.status.clone(),
            reason: Some(shown.reason.clone()),
            message: Some(message.clone()),
            last_transition_time: is_transition.then_some(Time(now)),
            ..k8s::PodCondition::default()
        })
    }
}
