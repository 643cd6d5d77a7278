//! Labels and annotations that inpod reads or writes: Istio's, Kubernetes' and, below `inpod.io`, its own. [`table`]
//! documents each; other crates never spell a key themselves.

mod ambient;
mod injection;
mod ours;
mod sidecar;

pub use ambient::*;
pub use injection::*;
pub use ours::*;
pub use sidecar::*;

/// A label or an annotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// The label or annotation itself.
    pub name: &'static str,
    /// The kind of object with it.
    pub location: Location,
    /// The use by inpod.
    pub access: Access,
    /// The component that uses it.
    pub by: &'static str,
    /// Permitted values, for the page.
    pub values: &'static str,
    /// Its effect, for the page.
    pub does: &'static str,
}

/// The kind of object with a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Location {
    /// A label of a pod.
    PodLabel,
    /// An annotation of a pod.
    PodAnnotation,
    /// A label of a namespace.
    NamespaceLabel,
    /// An annotation of a namespace.
    NamespaceAnnotation,
    /// An annotation of ConfigMap `inpod-leave`.
    LeaveAnnotation,
}

impl Location {
    /// Returns the text for the page.
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

/// The use of a key by inpod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// inpod reads what others wrote.
    Read,
    /// Written, and read for its current value.
    Written,
}

impl Access {
    /// Returns the text for the page.
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

/// Has a node's only credentials for the API server.
const POD_EVENTS: &str = "pod-events";

/// Values that only the injector reads may contain anything.
pub const INJECTOR: &str = "injector";

/// The component that repairs pods.
const REPAIR: &str = "repair";

const CLIENT: &str = "inpod";

/// Returns every key, once per component that uses it. Operators may name others in
/// `enablement_selectors`, `ztunnel_pods` and templates.
pub fn table() -> impl Iterator<Item = &'static Key> {
    [AMBIENT, OURS, SIDECAR, INJECTION].into_iter().flatten()
}

#[cfg(test)]
mod tests;
