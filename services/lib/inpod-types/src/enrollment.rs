use std::fmt;

/// A pod's membership in the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Enrollment {
    /// Outside the mesh: inpod changes nothing.
    None,
    /// Captured in its netns, served by the node's ztunnel.
    Ambient,
    /// Captured in its netns, served by a proxy in the pod.
    Sidecar,
    /// Undecided: the source of pods could not be read.
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
