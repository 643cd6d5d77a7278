//! The demand of a pod or namespace to be in the mesh: the label `inpod.io/require`.

use inpod_types::keys;

use crate::pod::{Labels, Namespace, Pod};

/// A demand, from the weakest to the strongest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Demand {
    #[default]
    None,
    /// The pod never starts outside the mesh, and leaves the mesh only when inpod is uninstalled.
    Mesh,
    /// Besides, new connections of a running pod are refused until ztunnel serves the pod.
    MeshOrStop,
}

impl Demand {
    /// Returns the stronger demand of the pod and its namespace, so that neither can weaken the other's.
    pub(crate) fn of(pod: &Pod, namespace: &Namespace) -> Self {
        Self::of_labels(&pod.labels).max(Self::of_namespace(namespace))
    }

    pub(crate) fn of_namespace(namespace: &Namespace) -> Self {
        Self::of_labels(&namespace.labels)
    }

    /// Reads an unknown value as `mesh`: a misspelled demand must not let a pod out.
    fn of_labels(labels: &Labels) -> Self {
        match labels.get(keys::REQUIRE).map(String::as_str) {
            None => Self::None,
            Some(keys::REQUIRE_MESH_OR_STOP) => Self::MeshOrStop,
            Some(_) => Self::Mesh,
        }
    }

    pub(crate) fn is_made(self) -> bool {
        self != Self::None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{namespace, pod};

    fn labels(value: Option<&str>) -> Labels {
        let label = |value: &str| (keys::REQUIRE.to_owned(), value.to_owned());
        value.map(label).into_iter().collect()
    }

    #[test]
    fn the_stronger_demand_of_pod_and_namespace_counts() {
        use Demand::{Mesh, MeshOrStop, None};
        let (mesh, stop, typo) = (Some("mesh"), Some("mesh-or-stop"), Some("Mesh-or-stop"));
        for (of_pod, of_namespace, expected) in [
            (Option::None, Option::None, None),
            (mesh, Option::None, Mesh),
            (Option::None, stop, MeshOrStop),
            (mesh, stop, MeshOrStop),
            (stop, mesh, MeshOrStop),
            (typo, Option::None, Mesh),
            (Some(""), Option::None, Mesh),
        ] {
            let (mut pod, mut namespace) = (pod("shop", "web"), namespace("shop"));
            (pod.labels, namespace.labels) = (labels(of_pod), labels(of_namespace));
            let demand = Demand::of(&pod, &namespace);
            assert_eq!(demand, expected, "{of_pod:?} {of_namespace:?}");
        }
    }
}
