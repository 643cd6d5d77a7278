use crate::boottime::BootInstant;

/// How far a sandbox has come. Written before the effects that it announces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Intent {
    /// Outside the mesh: nothing is in place.
    Out,
    /// Steps of enrolling may be in place.
    Enrolling,
    /// In the mesh by another agent's doing, as far as is known: its rules and ztunnel's listeners may be in place, and
    /// are to stay until they are replaced or taken away in order.
    Adopted,
    /// Everything is in place.
    Enrolled {
        /// The fingerprint of the rules.
        fingerprint: String,
    },
    /// Peers are to be told that the pod leaves: what says that it is redirected is being taken back. Everything is in
    /// place.
    Announcing,
    /// Peers were told that the pod leaves, and learn it; everything is still in place.
    Leaving {
        /// Since when.
        since: BootInstant,
    },
    /// New connections go direct, captured ones live on.
    Draining {
        /// Since when.
        since: BootInstant,
    },
    /// The sandbox ends.
    Deleting {
        /// Since when that is known.
        since: BootInstant,
    },
}

impl Intent {
    /// The fingerprint of the rules of what is enrolled.
    pub fn fingerprint(&self) -> Option<&str> {
        match self {
            Self::Enrolled { fingerprint } => Some(fingerprint),
            Self::Out
            | Self::Enrolling
            | Self::Adopted
            | Self::Announcing
            | Self::Leaving { .. }
            | Self::Draining { .. }
            | Self::Deleting { .. } => None,
        }
    }

    /// Whether the broker knows the sandbox, or needs to know nothing of it.
    pub fn is_settled(&self) -> bool {
        matches!(
            self,
            Self::Out | Self::Enrolled { .. } | Self::Deleting { .. }
        )
    }

    /// Whether it is where it would stay if nothing changed.
    pub fn is_stable(&self) -> bool {
        matches!(self, Self::Out | Self::Enrolled { .. } | Self::Adopted)
    }

    /// Whether anything may be in place.
    pub fn has_effects(&self) -> bool {
        !matches!(self, Self::Out)
    }

    /// Whether the pod was in the mesh, and may have connections that must not be cut by a failure.
    pub fn was_in_mesh(&self) -> bool {
        matches!(
            self,
            Self::Adopted
                | Self::Enrolled { .. }
                | Self::Announcing
                | Self::Leaving { .. }
                | Self::Draining { .. }
        )
    }
}
