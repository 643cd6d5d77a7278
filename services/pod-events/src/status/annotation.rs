//! The annotation by which peers see whether a pod is redirected.

use inpod_types::keys;

/// A value of `ambient.istio.io/redirection`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Annotation {
    Enabled,
    /// The pod belongs in the mesh, but no ztunnel has acknowledged the sandbox yet.
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
