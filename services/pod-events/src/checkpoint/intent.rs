use serde::{Deserialize, Serialize};

use crate::boottime::BootInstant;

/// A sandbox's progress, written before the announced effects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Intent {
    /// Outside the mesh: nothing is in place.
    Out,
    /// Parts of an enrollment may be in place.
    Enrolling,
    /// Another agent enrolled the sandbox, as far as known. Rules and ztunnel's listeners may be in place, and stay
    /// until inpod replaces them or withdraws them in order.
    #[serde(rename = "inherited")]
    Adopted,
    /// Another agent enrolled the sandbox with rules in iptables' legacy tables, which inpod can neither see nor
    /// replace. The sandbox keeps the rules, its workload and its listeners until the end.
    Legacy,
    /// The same as [`Self::Legacy`], but the broker has the sandbox. Both are `legacy` in a file.
    #[serde(rename(serialize = "legacy"), skip_deserializing)]
    ServedLegacy,
    Enrolled {
        fingerprint: String,
    },
    /// pod-events is withdrawing the pod's annotation to announce to peers that the pod leaves. Everything is still in
    /// place.
    Announcing,
    /// Peers are learning that the pod leaves. Everything is still in place.
    Leaving {
        #[serde(rename = "since_ms")]
        since: BootInstant,
    },
    /// New connections bypass the mesh; captured connections continue.
    Draining {
        #[serde(rename = "since_ms")]
        since: BootInstant,
    },
    Deleting {
        #[serde(rename = "since_ms")]
        since: BootInstant,
    },
}

impl Intent {
    pub fn fingerprint(&self) -> Option<&str> {
        let Self::Enrolled { fingerprint } = self else {
            return None;
        };
        Some(fingerprint)
    }

    /// Returns whether the broker has the sandbox or does not need the sandbox.
    pub fn is_settled(&self) -> bool {
        matches!(
            self,
            Self::Out | Self::ServedLegacy | Self::Enrolled { .. } | Self::Deleting { .. }
        )
    }

    pub fn is_stable(&self) -> bool {
        matches!(
            self,
            Self::Out | Self::Enrolled { .. } | Self::Adopted | Self::Legacy | Self::ServedLegacy
        )
    }

    pub fn has_effects(&self) -> bool {
        !matches!(self, Self::Out)
    }

    /// Returns whether the pod may have mesh connections that a failure must not cut.
    pub fn was_in_mesh(&self) -> bool {
        matches!(
            self,
            Self::Adopted
                | Self::Legacy
                | Self::ServedLegacy
                | Self::Enrolled { .. }
                | Self::Announcing
                | Self::Leaving { .. }
                | Self::Draining { .. }
        )
    }
}
