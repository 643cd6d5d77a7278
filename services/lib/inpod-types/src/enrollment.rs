use std::fmt;

/// A pod's membership in the mesh, from which inpod derives the redirection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Enrollment {
    /// The pod is outside the mesh, so inpod changes nothing.
    None,
    /// Traffic is captured in the pod's netns and served by the node's ztunnel.
    Ambient,
    /// Traffic is captured in the pod's netns and served by a proxy in the pod.
    Sidecar,
    /// The membership is undecided, because the source of pods could not be read.
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
