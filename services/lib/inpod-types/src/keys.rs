//! Labels and annotations that inpod reads or writes: Istio's, Kubernetes' and, below `inpod.io`, its own. [`table`]
//! documents each key, and other crates never spell a key themselves.

mod ambient;
mod injection;
mod ours;
mod sidecar;

pub use ambient::*;
pub use injection::*;
pub use ours::*;
pub use sidecar::*;

/// A label or an annotation, with its description for the reference page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// The name of the label or annotation, as it appears on the object.
    pub name: &'static str,
    /// The kind of object that has the label or annotation.
    pub location: Location,
    /// The access by inpod, which only reads the key or also writes a value.
    pub access: Access,
    /// The component that reads or writes the key.
    pub by: &'static str,
    /// The permitted values, described for the reference page.
    pub values: &'static str,
    /// The effect of the key, described for the reference page.
    pub does: &'static str,
}

/// The kind of object on which a key appears, and the kind of key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Location {
    /// A label of a pod, which selectors can match.
    PodLabel,
    /// An annotation of a pod, which selectors cannot match.
    PodAnnotation,
    /// A label of a namespace, which selectors can match.
    NamespaceLabel,
    /// An annotation of a namespace, which selectors cannot match.
    NamespaceAnnotation,
    /// An annotation of the ConfigMap `inpod-leave`.
    LeaveAnnotation,
}

impl Location {
    /// Returns the text for the column of the reference page.
    pub fn describe(self) -> &'static str {
        match self {
            Self::PodLabel => "pod, label",
            Self::PodAnnotation => "pod, annotation",
            Self::NamespaceLabel => "namespace, label",
            Self::NamespaceAnnotation => "namespace, annotation",
            Self::LeaveAnnotation => "ConfigMap `inpod-leave`, annotation",
        }
    }
}

/// The way in which inpod uses a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// inpod only reads the key, which other programs or people write.
    Read,
    /// inpod writes the key, and reads it for the current value.
    Written,
}

impl Access {
    /// Returns the text for the column of the reference page.
    pub fn describe(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Written => "written",
        }
    }
}

const fn row(
    by: &'static str,
    access: Access,
    name: &'static str,
    location: Location,
    values: &'static str,
    does: &'static str,
) -> Key {
    Key {
        name,
        location,
        access,
        by,
        values,
        does,
    }
}

/// The only component of a node with credentials for the API server.
const POD_EVENTS: &str = "pod-events";

/// The injector. Values of keys that no other component reads may contain anything.
pub const INJECTOR: &str = "injector";

/// The component that repairs pods without redirection.
const REPAIR: &str = "repair";

const CLIENT: &str = "inpod";

/// Returns every key, once per component that uses the key. Operators may name further keys in `enablement_selectors`,
/// `ztunnel_pods` and templates.
pub fn table() -> impl Iterator<Item = &'static Key> {
    [AMBIENT, OURS, SIDECAR, INJECTION].into_iter().flatten()
}

#[cfg(test)]
mod tests;
