//! The annotation that tells peers whether a pod is redirected.

use inpod_types::keys;

/// A value of `ambient.istio.io/redirection`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Annotation {
    Enabled,
    /// Belongs in the mesh, but no ztunnel has acknowledged this sandbox yet.
    Pending,
    Absent,
}

impl Annotation {
    pub(crate) fn value(self) -> Option<&'static str> {
        match self {
            Self::Enabled => Some(keys::REDIRECTION_ENABLED),
            Self::Pending => Some(keys::REDIRECTION_PENDING),
            Self::Absent => None,
        }
    }

    pub(crate) fn matches(self, shown: Option<&str>) -> bool {
        self.value() == shown
    }
}
