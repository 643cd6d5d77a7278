//! The labels and annotations that inpod reads or writes: Istio's, Kubernetes' own and, below `inpod.io`, inpod's.
//! [`table`] documents each; other crates use the constants and never spell a key themselves.

mod ambient;
mod injection;
mod ours;
mod sidecar;

pub use ambient::*;
pub use injection::*;
pub use ours::*;
pub use sidecar::*;

/// A label or an annotation that inpod reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// The name of the label or annotation.
    pub name: &'static str,
    /// The kind of object that has it.
    pub location: Location,
    /// The use that inpod makes of it.
    pub access: Access,
    /// The component that reads or writes it.
    pub by: &'static str,
    /// The permitted values, for the page.
    pub values: &'static str,
    /// Its effect, for the page.
    pub does: &'static str,
}

/// The kind of object that a key is on.
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
    /// An annotation of the ConfigMap `inpod-leave`.
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

/// The use that inpod makes of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// inpod reads what others wrote.
    Read,
    /// inpod writes it, and reads its current value.
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

/// The only component on a node with credentials for the API server.
const POD_EVENTS: &str = "pod-events";

/// The injector. The values of keys that only it reads may contain anything.
pub const INJECTOR: &str = "injector";

/// The component that repairs pods without redirection.
const REPAIR: &str = "repair";

/// The client for operators.
const CLIENT: &str = "inpod";

/// Returns every label and annotation, once for each component that uses it. Operators may name others in
/// `enablement_selectors`, `ztunnel_pods` and templates.
pub fn table() -> impl Iterator<Item = &'static Key> {
    [AMBIENT, OURS, SIDECAR, INJECTION].into_iter().flatten()
}

#[cfg(test)]
mod tests;
