use std::fmt;

/// Whether a pod belongs to the mesh, and how. Decides everything downstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Enrollment {
    /// Outside the mesh: nothing is touched.
    None,
    /// Captured inside its netns and served by the node's ztunnel.
    Ambient,
    /// Captured inside its netns and served by a proxy in the pod.
    Sidecar,
    /// The source of pods could not tell.
    Unknown,
}

impl fmt::Display for Enrollment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Ambient => "ambient",
            Self::Sidecar => "sidecar",
            Self::Unknown => "unknown",
        })
    }
}
