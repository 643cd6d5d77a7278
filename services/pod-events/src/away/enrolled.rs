//! Which namespaces have pods in the mesh, for the plugin to know while pod-events is away.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::Path,
};

use inpod_cni::enrolled::EnrolledNamespaces;
use inpod_types::{Enrollment, NamespaceName, PodName, keys};

use crate::{
    decide::{Policy, Selectors, decide_from},
    pod::Pod,
    redirection::Permissions,
    source::{Inventory, PodKey},
};

/// The namespaces that a selector names by their labels, that have a pod which is to be in the mesh, by ztunnel or by a
/// sidecar, or one that is in it; but for those whose annotation `inpod.io/on-unknown` says otherwise. A change costs a look at the namespaces that it
/// concerns and at their pods of this node.
#[derive(Debug)]
pub(super) struct Enrolled {
    selectors: Selectors,
    excluded: Vec<NamespaceName>,
    sidecars: bool,
    /// The inventory that the rest is about.
    seen: Inventory,
    pods: BTreeMap<NamespaceName, BTreeSet<PodName>>,
    held: BTreeSet<NamespaceName>,
    wanted: BTreeSet<NamespaceName>,
}

impl Enrolled {
    pub(super) fn new(policy: &Policy<'_>) -> Self {
        Self {
            selectors: policy.selectors.clone(),
            excluded: policy.excluded.to_owned(),
            sidecars: policy.sidecars,
            seen: Inventory::default(),
            pods: BTreeMap::new(),
            held: BTreeSet::new(),
            wanted: BTreeSet::new(),
        }
    }

    /// The namespaces.
    pub(super) fn wanted(&self) -> &BTreeSet<NamespaceName> {
        &self.wanted
    }

    /// Those of them that have a pod in the mesh.
    pub(super) fn held(&self) -> &BTreeSet<NamespaceName> {
        &self.held
    }

    /// Something else is known of pods and namespaces. Whether the namespaces have a pod in the mesh is asked again.
    pub(super) fn follow(&mut self, now: &Inventory, is_held: impl Fn(&NamespaceName) -> bool) {
        let changes = now.since(&self.seen);
        self.seen = now.clone();
        let mut touched = changes.namespaces;
        for key in changes.pods {
            self.count(&key);
            touched.insert(key.0);
        }
        for namespace in &touched {
            set(&mut self.held, namespace, is_held(namespace));
            self.judge(namespace);
        }
    }

    /// These namespaces have a pod in the mesh.
    pub(super) fn hold(&mut self, held: BTreeSet<NamespaceName>) {
        let before = std::mem::replace(&mut self.held, held);
        let touched: Vec<_> = before.symmetric_difference(&self.held).cloned().collect();
        touched.iter().for_each(|namespace| self.judge(namespace));
    }

    /// Keeps the pods of a namespace.
    fn count(&mut self, key: &PodKey) {
        let (namespace, name) = key;
        let pods = self.pods.entry(namespace.clone()).or_default();
        set(pods, name, self.seen.pods.contains_key(key));
        if pods.is_empty() {
            self.pods.remove(namespace);
        }
    }

    fn judge(&mut self, name: &NamespaceName) {
        let namespace = self.seen.namespaces.get(name);
        let says = |value| {
            namespace.is_some_and(|namespace| namespace.on_unknown.as_deref() == Some(value))
        };
        let selected = namespace.is_some_and(|it| self.selectors.selects_namespace(it));
        let asks = (selected || says(keys::ON_UNKNOWN_CLOSED)) && !self.excluded.contains(name);
        let wanted = !says(keys::ON_UNKNOWN_OPEN)
            && (asks || self.held.contains(name) || self.has_joining_pod(name));
        set(&mut self.wanted, name, wanted);
    }

    fn has_joining_pod(&self, namespace: &NamespaceName) -> bool {
        let names = self.pods.get(namespace).into_iter().flatten();
        let mut pods = names.filter_map(|name| self.seen.pod(&(namespace.clone(), name.clone())));
        let policy = Policy {
            selectors: &self.selectors,
            excluded: &self.excluded,
            // What pods may ask for decides on no enrollment.
            pods_may: Permissions::default(),
            sidecars: self.sidecars,
            is_uninstalling: false,
        };
        let joins = |pod: &Pod| {
            let decided = decide_from(&self.seen, pod, &policy).enrollment;
            matches!(decided, Enrollment::Ambient | Enrollment::Sidecar)
        };
        pods.any(joins)
    }
}

fn set<T: Ord + Clone>(all: &mut BTreeSet<T>, one: &T, is_in: bool) {
    if is_in {
        all.insert(one.clone());
    } else {
        all.remove(one);
    }
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
    use std::{cell::Cell, fs};

    use inpod_cni::enrolled::ENROLLED_FILE;

    use super::*;
    use crate::{
        decide::Labels,
        testing::{namespace, pod},
    };

    fn names(names: &[&str]) -> BTreeSet<NamespaceName> {
        names.iter().map(|name| name.parse().unwrap()).collect()
    }

    fn mode(mode: &str) -> Labels {
        [(keys::DATAPLANE_MODE.to_owned(), mode.to_owned())].into()
    }

    /// With these namespaces excluded.
    fn enrolled(selectors: &str, excluded: &[&str]) -> Enrolled {
        let excluded: Vec<_> = names(excluded).into_iter().collect();
        Enrolled::new(&Policy {
            selectors: &selectors.parse().unwrap(),
            excluded: &excluded,
            pods_may: Permissions::default(),
            sidecars: true,
            is_uninstalling: false,
        })
    }

    fn wanted(
        mut enrolled: Enrolled,
        inventory: &Inventory,
        held: &[&str],
    ) -> BTreeSet<NamespaceName> {
        let held = names(held);
        enrolled.follow(inventory, |namespace| held.contains(namespace));
        enrolled.hold(held);
        enrolled.wanted().clone()
    }

    /// With the namespace `system` excluded.
    fn found(selectors: &str, inventory: &Inventory, held: &[&str]) -> BTreeSet<NamespaceName> {
        wanted(enrolled(selectors, &["system"]), inventory, held)
    }

    fn inventory() -> Inventory {
        let mut inventory = Inventory::default();
        for (name, labels) in [
            ("labelled", mode("ambient")),
            ("plain", mode("none")),
            ("system", mode("ambient")),
        ] {
            let mut namespace = namespace(name);
            namespace.labels = labels;
            inventory
                .namespaces
                .insert(namespace.name.clone(), namespace);
        }
        for (name, labels) in [("mixed", mode("ambient")), ("plain", Labels::new())] {
            let mut pod = pod(name, "web");
            pod.labels = labels;
            let key = (pod.pod.namespace.clone(), pod.pod.name.clone());
            inventory.pods.insert(key, pod);
        }
        inventory
    }

    #[test]
    fn a_namespace_counts_by_its_label_by_its_pods_labels_and_by_what_is_held() {
        let with = found(keys::ISTIO_SELECTORS, &inventory(), &["shop"]);
        assert_eq!(with, names(&["labelled", "mixed", "shop"]));
        let without = found(keys::ISTIO_SELECTORS, &inventory(), &[]);
        assert_eq!(without, names(&["labelled", "mixed"]));
    }

    #[test]
    fn a_namespace_counts_by_its_pods_with_a_sidecar_while_those_are_redirected() {
        let mut inventory = Inventory::default();
        let mut pod = pod("legacy", "web");
        pod.injection = Some(crate::testing::injection().into());
        let key = (pod.pod.namespace.clone(), pod.pod.name.clone());
        inventory.pods.insert(key, pod);
        let of = |sidecars| {
            let enrolled = Enrolled {
                sidecars,
                ..enrolled(keys::ISTIO_SELECTORS, &[])
            };
            wanted(enrolled, &inventory, &[])
        };
        assert_eq!(of(true), names(&["legacy"]));
        assert_eq!(of(false), names(&[]));
    }

    #[test]
    fn a_namespace_counts_by_what_the_selectors_say_of_namespaces() {
        let found = |selectors| found(selectors, &inventory(), &[]);
        let by_name = "[{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: plain}}}]";
        assert_eq!(found(by_name), names(&["plain"]));
        // One that says nothing of namespaces names none but those of the pods that it selects.
        let every_pod = "[{}]";
        assert_eq!(found(every_pod), names(&["mixed", "plain"]));
        assert_eq!(found("[]"), names(&[]));
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
            let mut namespace = inventory.namespaces.get(&name).unwrap().clone();
            namespace.on_unknown = Some(said.to_owned());
            inventory.namespaces.insert(name, namespace);
        }
        assert_eq!(
            found(keys::ISTIO_SELECTORS, &inventory, &[]),
            names(&["mixed", "plain"])
        );
    }

    #[test]
    fn what_changes_later_counts_as_if_it_had_always_been_so() {
        let istio = || enrolled(keys::ISTIO_SELECTORS, &[]);
        let mut enrolled = istio();
        let mut now = inventory();
        let key = ("mixed".parse().unwrap(), "web".parse().unwrap());
        let mut steps = vec![now.clone()];
        now.pods.remove(&key);
        steps.push(now.clone());
        now.namespaces.remove(&"labelled".parse().unwrap());
        steps.push(now.clone());
        let mut plain = namespace("plain");
        plain.labels = mode("ambient");
        now.namespaces.insert(plain.name.clone(), plain);
        steps.push(now);
        steps.push(inventory());
        for held in [&["shop"][..], &[]] {
            for step in &steps {
                enrolled.follow(step, |namespace| names(held).contains(namespace));
                enrolled.hold(names(held));
                assert_eq!(enrolled.wanted(), &wanted(istio(), step, held));
            }
        }
    }

    #[test]
    fn a_change_costs_a_look_at_the_namespaces_that_it_concerns() {
        for others in [10, 1_000, 10_000] {
            let mut now = Inventory::default();
            for number in 0..others {
                let namespace = namespace(&format!("n{number}"));
                now.namespaces.insert(namespace.name.clone(), namespace);
            }
            let mut enrolled = enrolled(keys::ISTIO_SELECTORS, &[]);
            enrolled.follow(&now, |_| false);
            let looks = Cell::new(0);
            let mut changed = namespace("n7");
            changed.labels = mode("ambient");
            now.namespaces.insert(changed.name.clone(), changed);
            enrolled.follow(&now, |_| {
                looks.set(looks.get() + 1);
                false
            });
            assert_eq!((looks.get(), enrolled.wanted()), (1, &names(&["n7"])));
        }
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
