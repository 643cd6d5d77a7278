//! The labels and annotations that inpod reads or writes. Names and values are Istio's,
//! Kubernetes' own, or, below `inpod.io`, ours. [`table`] says what each is for; nobody else spells them.

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
    /// Its name.
    pub name: &'static str,
    /// What it stands on.
    pub location: Location,
    /// What inpod does with it.
    pub access: Access,
    /// The component that does it.
    pub by: &'static str,
    /// What it may hold, for people.
    pub values: &'static str,
    /// What it does, for people: half a sentence.
    pub does: &'static str,
}

/// What a key stands on.
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
    /// In words.
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

/// What inpod does with a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads what others wrote.
    Read,
    /// Writes it, and reads it to see what it says now.
    Written,
}

impl Access {
    /// In words.
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

/// The only component with an API credential on each node.
const POD_EVENTS: &str = "pod-events";

/// The component that injects. What it alone reads may hold anything of its author's.
pub const INJECTOR: &str = "injector";

/// The component that looks for pods without redirection.
const REPAIR: &str = "repair";

/// The client for people.
const CLIENT: &str = "inpod";

/// Every label and annotation, once for each component that reads or writes it. What `enablement_selectors`,
/// `ztunnel_pods` and templates name besides is the operator's own.
pub fn table() -> impl Iterator<Item = &'static Key> {
    [AMBIENT, OURS, SIDECAR, INJECTION].into_iter().flatten()
}

#[cfg(test)]
mod tests;
