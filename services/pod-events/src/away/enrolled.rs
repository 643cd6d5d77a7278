//! Which namespaces have pods in the mesh, for the plugin to know while pod-events is away.

use std::{collections::BTreeSet, io, path::Path};

use inpod_cni::enrolled::EnrolledNamespaces;
use workload::{Enrollment, NamespaceName, keys};

use crate::{checkpoint::Record, decide::decide_from, pod::Pod, source::Inventory};

/// The namespaces that are labelled, that have a pod which is to be in the mesh, or one that is in it; and what their
/// annotation `inpod.io/on-unknown` says otherwise.
pub(super) fn wanted(
    inventory: &Inventory,
    excluded: &[NamespaceName],
    records: &[Record],
) -> BTreeSet<NamespaceName> {
    let is = |value: &Option<String>, expected| value.as_deref() == Some(expected);
    let labelled = inventory.namespaces.values().filter(|namespace| {
        (is(&namespace.dataplane_mode, keys::DATAPLANE_MODE_AMBIENT)
            || is(&namespace.on_unknown, keys::ON_UNKNOWN_CLOSED))
            && !excluded.contains(&namespace.name)
    });
    let joins =
        |pod: &&Pod| decide_from(inventory, pod, excluded).enrollment == Enrollment::Ambient;
    let joining = inventory.pods.values().filter(joins);
    let held = records.iter().filter(|record| record.intent.is_held());
    let mut names: BTreeSet<_> = labelled.map(|namespace| namespace.name.clone()).collect();
    names.extend(joining.map(|pod| pod.pod.namespace.clone()));
    names.extend(held.map(|record| record.pod.namespace.clone()));
    names.retain(|name| {
        let namespace = inventory.namespaces.get(name);
        !namespace.is_some_and(|namespace| is(&namespace.on_unknown, keys::ON_UNKNOWN_OPEN))
    });
    names
}

/// Writes the list if it says something else. As long as the source does not know everything nothing is taken from it,
/// and none is begun: without a list the plugin lets no pod pass, with one it lets every other pod pass.
pub(super) fn update(
    state_dir: &Path,
    mut wanted: BTreeSet<NamespaceName>,
    complete: bool,
) -> io::Result<()> {
    let known = EnrolledNamespaces::read(state_dir);
    if !complete {
        let Some(known) = known? else {
            return Ok(());
        };
        wanted.extend(known.names());
        return write(state_dir, &wanted, Some(&known));
    }
    // One that cannot be read is replaced.
    write(state_dir, &wanted, known.ok().flatten().as_ref())
}

fn write(
    state_dir: &Path,
    wanted: &BTreeSet<NamespaceName>,
    known: Option<&EnrolledNamespaces>,
) -> io::Result<()> {
    let wanted_list = EnrolledNamespaces::of(wanted);
    if known == Some(&wanted_list) {
        return Ok(());
    }
    wanted_list.write(state_dir)?;
    let names: Vec<_> = wanted.iter().map(NamespaceName::as_str).collect();
    tracing::info!(
        namespaces = names.join(","),
        "Wrote down which namespaces have pods in the mesh"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use inpod_cni::enrolled::ENROLLED_FILE;

    use super::*;
    use crate::{
        checkpoint::Intent,
        testing::{namespace, pod, record},
    };

    fn names(names: &[&str]) -> BTreeSet<NamespaceName> {
        names.iter().map(|name| name.parse().unwrap()).collect()
    }

    fn ambient() -> Option<String> {
        Some("ambient".to_owned())
    }

    fn inventory() -> Inventory {
        let mut inventory = Inventory::default();
        for (name, mode) in [
            ("labelled", ambient()),
            ("plain", None),
            ("system", ambient()),
        ] {
            let mut namespace = namespace(name);
            namespace.dataplane_mode = mode;
            inventory
                .namespaces
                .insert(namespace.name.clone(), namespace);
        }
        for (name, mode) in [("mixed", ambient()), ("plain", None)] {
            let mut pod = pod(name, "web");
            pod.dataplane_mode = mode;
            let key = (pod.pod.namespace.clone(), pod.pod.name.clone());
            inventory.pods.insert(key, pod);
        }
        inventory
    }

    #[test]
    fn a_namespace_counts_by_its_label_by_its_pods_labels_and_by_what_is_held() {
        let held = Record {
            intent: Intent::Enrolling,
            ..record("c1")
        };
        let excluded = ["system".parse().unwrap()];
        let found = wanted(&inventory(), &excluded, &[held]);
        assert_eq!(found, names(&["labelled", "mixed", "shop"]));
        let found = wanted(&inventory(), &excluded, &[record("c1")]);
        assert_eq!(found, names(&["labelled", "mixed"]));
    }

    #[test]
    fn a_namespace_may_say_itself_whether_its_pods_wait() {
        let mut inventory = inventory();
        for (name, said) in [
            ("labelled", "open"),
            ("plain", "closed"),
            ("system", "closed"),
        ] {
            let name: NamespaceName = name.parse().unwrap();
            inventory.namespaces.get_mut(&name).unwrap().on_unknown = Some(said.to_owned());
        }
        let excluded = ["system".parse().unwrap()];
        assert_eq!(
            wanted(&inventory, &excluded, &[]),
            names(&["mixed", "plain"])
        );
    }

    #[test]
    fn the_list_follows_what_is_known() {
        let dir = tempfile::tempdir().unwrap();
        let state_dir = dir.path().join("plugin");
        for now in [names(&["shop", "bank"]), names(&["bank"]), names(&[])] {
            update(&state_dir, now.clone(), true).unwrap();
            let read = EnrolledNamespaces::read(&state_dir).unwrap().unwrap();
            assert_eq!(read.names(), now);
        }
    }

    #[test]
    fn nothing_is_taken_from_the_list_while_the_source_does_not_know_everything() {
        let dir = tempfile::tempdir().unwrap();
        update(dir.path(), names(&["shop"]), true).unwrap();
        update(dir.path(), names(&["bank"]), false).unwrap();
        let read = EnrolledNamespaces::read(dir.path()).unwrap().unwrap();
        assert_eq!(read.names(), names(&["bank", "shop"]));
    }

    #[test]
    fn no_list_is_begun_from_a_part_of_the_truth() {
        let dir = tempfile::tempdir().unwrap();
        update(dir.path(), names(&["shop"]), false).unwrap();
        assert_eq!(EnrolledNamespaces::read(dir.path()).unwrap(), None);
    }

    #[test]
    fn a_list_that_says_the_same_is_not_written_again() {
        use std::os::unix::fs::MetadataExt as _;
        let dir = tempfile::tempdir().unwrap();
        let inode = || fs::metadata(dir.path().join(ENROLLED_FILE)).unwrap().ino();
        update(dir.path(), names(&["shop"]), true).unwrap();
        // Held open, or its inode number could be given to its successor.
        let _open = fs::File::open(dir.path().join(ENROLLED_FILE)).unwrap();
        let before = inode();
        update(dir.path(), names(&["shop"]), true).unwrap();
        assert_eq!(inode(), before);
    }

    #[test]
    fn a_directory_that_cannot_be_made_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let state_dir = dir.path().join("plugin");
        fs::write(&state_dir, "a file").unwrap();
        update(&state_dir, names(&["shop"]), true).unwrap_err();
    }
}
