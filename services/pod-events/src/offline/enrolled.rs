//! The namespaces with pods in the mesh, for the plugin while pod-events is unavailable.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::Path,
};

use inpod_cni::enrolled::EnrolledNamespaces;
use inpod_types::{Enrollment, NamespaceName, PodName, keys};

use crate::{
    decide::{ClassPattern, Demand, Policy, Selectors, decide_from},
    inventory::Inventory,
    pod::{Pod, PodKey},
    redirection::Permissions,
};

/// The number of namespaces that a message names.
const MAX_LOGGED_NAMES: usize = 8;

/// Tracks the namespaces whose pods must not be admitted unenrolled: namespaces whose labels a selector matches, and
/// namespaces with a pod that is or should be in the mesh, by ztunnel or sidecar. A namespace's annotation
/// `inpod.io/on-unknown` overrides the tracking, and the label `inpod.io/require` overrides the annotation. Only the
/// affected namespaces and pods are evaluated.
#[derive(Debug)]
pub(super) struct EnrolledTracker {
    selectors: Selectors,
    excluded: Vec<NamespaceName>,
    sandboxed: Vec<ClassPattern>,
    sidecars: bool,
    /// The inventory that the other fields reflect.
    inventory: Inventory,
    /// The pods that are to be in the mesh, by namespace.
    joining: BTreeMap<NamespaceName, BTreeSet<PodName>>,
    /// The namespaces with a pod in the mesh.
    held: BTreeSet<NamespaceName>,
    wanted: BTreeSet<NamespaceName>,
    /// The number of decisions, for the test of the cost of a change.
    #[cfg(test)]
    decisions: usize,
}

impl EnrolledTracker {
    pub(super) fn new(policy: &Policy<'_>) -> Self {
        Self {
            selectors: policy.selectors.clone(),
            excluded: policy.excluded.to_owned(),
            sandboxed: policy.sandboxed.to_owned(),
            sidecars: policy.sidecars,
            inventory: Inventory::default(),
            joining: BTreeMap::new(),
            held: BTreeSet::new(),
            wanted: BTreeSet::new(),
            #[cfg(test)]
            decisions: 0,
        }
    }

    pub(super) fn wanted(&self) -> &BTreeSet<NamespaceName> {
        &self.wanted
    }

    pub(super) fn held(&self) -> &BTreeSet<NamespaceName> {
        &self.held
    }

    /// Processes changes of the inventory and of the namespaces with a pod in the mesh.
    pub(super) fn update(&mut self, now: &Inventory, held: BTreeSet<NamespaceName>) {
        let changes = now.changes_since(&self.inventory);
        let pods = now.affected_since(&self.inventory);
        let mut affected = &changes.namespaces | &(&held ^ &self.held);
        affected.extend(pods.iter().map(|(namespace, _)| namespace.clone()));
        (self.inventory, self.held) = (now.clone(), held);
        pods.iter().for_each(|key| self.decide_joining(key));
        for name in affected {
            if self.is_wanted(&name) {
                self.wanted.insert(name);
            } else {
                self.wanted.remove(&name);
            }
        }
    }

    fn decide_joining(&mut self, (namespace, name): &PodKey) {
        #[cfg(test)]
        {
            self.decisions += 1;
        }
        let pod = self.inventory.pods.get(&(namespace.clone(), name.clone()));
        if pod.is_some_and(|pod| self.is_joining(pod)) {
            let of_namespace = self.joining.entry(namespace.clone()).or_default();
            of_namespace.insert(name.clone());
        } else if let Some(of_namespace) = self.joining.get_mut(namespace) {
            of_namespace.remove(name);
            if of_namespace.is_empty() {
                self.joining.remove(namespace);
            }
        }
    }

    fn is_wanted(&self, name: &NamespaceName) -> bool {
        let namespace = self.inventory.namespaces.get(name);
        if namespace.is_some_and(|namespace| Demand::of_namespace(namespace).is_made()) {
            return true;
        }
        let has_policy = |value| {
            namespace.is_some_and(|namespace| namespace.on_unknown.as_deref() == Some(value))
        };
        let is_selected = namespace.is_some_and(|it| self.selectors.selects_namespace(it));
        let waits_when_unknown =
            (is_selected || has_policy(keys::ON_UNKNOWN_CLOSED)) && !self.excluded.contains(name);
        !has_policy(keys::ON_UNKNOWN_OPEN)
            && (waits_when_unknown || self.held.contains(name) || self.joining.contains_key(name))
    }

    fn is_joining(&self, pod: &Pod) -> bool {
        let policy = Policy {
            selectors: &self.selectors,
            excluded: &self.excluded,
            sandboxed: &self.sandboxed,
            // Permissions of pods do not affect enrollment.
            pods_may: Permissions::default(),
            sidecars: self.sidecars,
            is_uninstalling: false,
        };
        let decided = decide_from(&self.inventory, pod, &policy).enrollment;
        matches!(decided, Enrollment::Ambient | Enrollment::Sidecar)
    }
}

/// Writes the list if the list changed. While the source is incomplete, namespaces are only added, and no list is
/// created: without a list, the plugin admits no pod unenrolled; with a list, the plugin admits pods of unlisted
/// namespaces.
pub(super) fn write(
    state_dir: &Path,
    mut wanted: BTreeSet<NamespaceName>,
    complete: bool,
) -> io::Result<()> {
    let current = EnrolledNamespaces::read(state_dir);
    if !complete {
        let Some(current) = current? else {
            return Ok(());
        };
        wanted.extend(current.names());
        return write_if_changed(state_dir, &wanted, Some(&current));
    }
    // An unreadable list is replaced.
    write_if_changed(state_dir, &wanted, current.ok().flatten().as_ref())
}

fn write_if_changed(
    state_dir: &Path,
    wanted: &BTreeSet<NamespaceName>,
    current: Option<&EnrolledNamespaces>,
) -> io::Result<()> {
    let wanted_list = EnrolledNamespaces::of(wanted);
    if current == Some(&wanted_list) {
        return Ok(());
    }
    wanted_list.write(state_dir)?;
    let known = current.map(EnrolledNamespaces::names).unwrap_or_default();
    tracing::info!(
        count = wanted.len(),
        added = describe_names(wanted.difference(&known)),
        removed = describe_names(known.difference(wanted)),
        "Wrote the list of namespaces with pods in the mesh"
    );
    Ok(())
}

/// Joins the first names, and counts the rest.
fn describe_names<'a>(names: impl Iterator<Item = &'a NamespaceName>) -> String {
    let names: Vec<_> = names.map(NamespaceName::as_str).collect();
    let (named, others) = names.split_at(MAX_LOGGED_NAMES.min(names.len()));
    match others.len() {
        0 => named.join(","),
        count => format!("{} and {count} more", named.join(",")),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use inpod_cni::enrolled::ENROLLED_FILE;

    use super::*;
    use crate::{
        pod::Labels,
        testing::{namespace, pod},
    };

    fn parse_names(names: &[&str]) -> BTreeSet<NamespaceName> {
        names.iter().map(|name| name.parse().unwrap()).collect()
    }

    fn mode_label(mode: &str) -> Labels {
        [(keys::DATAPLANE_MODE.to_owned(), mode.to_owned())].into()
    }

    fn enrolled(selectors: &str, excluded: &[&str]) -> EnrolledTracker {
        let excluded: Vec<_> = parse_names(excluded).into_iter().collect();
        EnrolledTracker::new(&Policy {
            selectors: &selectors.parse().unwrap(),
            excluded: &excluded,
            sandboxed: &[],
            pods_may: Permissions::default(),
            sidecars: true,
            is_uninstalling: false,
        })
    }

    fn wanted(
        mut enrolled: EnrolledTracker,
        inventory: &Inventory,
        held: &[&str],
    ) -> BTreeSet<NamespaceName> {
        enrolled.update(inventory, parse_names(held));
        enrolled.wanted().clone()
    }

    /// Evaluates with the namespace `system` excluded.
    fn found(selectors: &str, inventory: &Inventory, held: &[&str]) -> BTreeSet<NamespaceName> {
        wanted(enrolled(selectors, &["system"]), inventory, held)
    }

    fn inventory() -> Inventory {
        let mut inventory = Inventory::default();
        for (name, labels) in [
            ("labelled", mode_label("ambient")),
            ("plain", mode_label("none")),
            ("system", mode_label("ambient")),
        ] {
            let mut namespace = namespace(name);
            namespace.labels = labels;
            inventory
                .namespaces
                .insert(namespace.name.clone(), namespace);
        }
        for (name, labels) in [("mixed", mode_label("ambient")), ("plain", Labels::new())] {
            let mut pod = pod(name, "web");
            pod.labels = labels;
            let key = (pod.pod.namespace.clone(), pod.pod.name.clone());
            inventory.pods.insert(key, pod);
        }
        inventory
    }

    #[test]
    fn a_namespace_counts_by_its_label_by_its_pods_labels_and_by_what_has_effects() {
        let with = found(keys::ISTIO_SELECTORS, &inventory(), &["shop"]);
        assert_eq!(with, parse_names(&["labelled", "mixed", "shop"]));
        let without = found(keys::ISTIO_SELECTORS, &inventory(), &[]);
        assert_eq!(without, parse_names(&["labelled", "mixed"]));
    }

    #[test]
    fn a_namespace_counts_by_its_pods_with_a_sidecar_while_those_are_redirected() {
        let mut inventory = Inventory::default();
        let mut pod = pod("legacy", "web");
        pod.injection = Some(crate::testing::injection().into());
        let key = (pod.pod.namespace.clone(), pod.pod.name.clone());
        inventory.pods.insert(key, pod);
        let of = |sidecars| {
            let enrolled = EnrolledTracker {
                sidecars,
                ..enrolled(keys::ISTIO_SELECTORS, &[])
            };
            wanted(enrolled, &inventory, &[])
        };
        assert_eq!(of(true), parse_names(&["legacy"]));
        assert_eq!(of(false), parse_names(&[]));
    }

    #[test]
    fn a_namespace_counts_by_what_the_selectors_say_of_namespaces() {
        let found = |selectors| found(selectors, &inventory(), &[]);
        let by_name = "[{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: plain}}}]";
        assert_eq!(found(by_name), parse_names(&["plain"]));
        // A selector without a namespace part matches namespaces only through their pods.
        let every_pod = "[{}]";
        assert_eq!(found(every_pod), parse_names(&["mixed", "plain"]));
        assert_eq!(found("[]"), parse_names(&[]));
    }

    #[test]
    fn a_namespace_annotation_overrides_whether_its_pods_wait() {
        let mut inventory = inventory();
        for (name, policy) in [
            ("labelled", "open"),
            ("plain", "closed"),
            ("system", "closed"),
        ] {
            let name: NamespaceName = name.parse().unwrap();
            let mut namespace = inventory.namespaces.get(&name).unwrap().clone();
            namespace.on_unknown = Some(policy.to_owned());
            inventory.namespaces.insert(name, namespace);
        }
        assert_eq!(
            found(keys::ISTIO_SELECTORS, &inventory, &[]),
            parse_names(&["mixed", "plain"])
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
        plain.labels = mode_label("ambient");
        now.namespaces.insert(plain.name.clone(), plain);
        steps.push(now);
        steps.push(inventory());
        for held in [&["shop"][..], &[]] {
            for step in &steps {
                enrolled.update(step, parse_names(held));
                assert_eq!(enrolled.wanted(), &wanted(istio(), step, held));
            }
        }
    }

    #[test]
    fn a_change_of_a_pod_decides_about_no_other_pod() {
        let mut inventory = inventory();
        for number in 0..900 {
            let pod = pod("plain", &format!("web-{number}"));
            let key = (pod.pod.namespace.clone(), pod.pod.name.clone());
            inventory.pods.insert(key, pod);
        }
        let mut enrolled = enrolled(keys::ISTIO_SELECTORS, &[]);
        enrolled.update(&inventory, BTreeSet::new());
        let before = enrolled.decisions;
        let mut changed = pod("plain", "web-7");
        changed.labels = mode_label("ambient");
        let key = (changed.pod.namespace.clone(), changed.pod.name.clone());
        inventory.pods.insert(key, changed);
        enrolled.update(&inventory, BTreeSet::new());
        assert_eq!(enrolled.decisions - before, 1);
        assert!(enrolled.wanted().contains(&"plain".parse().unwrap()));
    }

    #[test]
    fn the_list_follows_what_is_known() {
        let dir = tempfile::tempdir().unwrap();
        let state_dir = dir.path().join("plugin");
        for now in [
            parse_names(&["shop", "bank"]),
            parse_names(&["bank"]),
            parse_names(&[]),
        ] {
            write(&state_dir, now.clone(), true).unwrap();
            let read = EnrolledNamespaces::read(&state_dir).unwrap().unwrap();
            assert_eq!(read.names(), now);
        }
    }

    #[test]
    fn nothing_is_taken_from_the_list_while_the_source_does_not_know_everything() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), parse_names(&["shop"]), true).unwrap();
        write(dir.path(), parse_names(&["bank"]), false).unwrap();
        let read = EnrolledNamespaces::read(dir.path()).unwrap().unwrap();
        assert_eq!(read.names(), parse_names(&["bank", "shop"]));
    }

    #[test]
    fn no_list_is_begun_from_a_part_of_the_truth() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), parse_names(&["shop"]), false).unwrap();
        assert_eq!(EnrolledNamespaces::read(dir.path()).unwrap(), None);
    }

    #[test]
    fn a_message_names_a_few_namespaces_and_counts_the_rest() {
        let names: BTreeSet<_> = (0..MAX_LOGGED_NAMES + 3)
            .map(|number| format!("n{number:02}").parse().unwrap())
            .collect();
        assert_eq!(describe_names(names.iter().take(2)), "n00,n01");
        assert!(describe_names(names.iter()).ends_with(",n07 and 3 more"));
    }

    #[test]
    fn an_unchanged_list_is_not_written_again() {
        use std::os::unix::fs::MetadataExt as _;
        let dir = tempfile::tempdir().unwrap();
        let inode = || fs::metadata(dir.path().join(ENROLLED_FILE)).unwrap().ino();
        write(dir.path(), parse_names(&["shop"]), true).unwrap();
        // The file stays open, because the inode number could be reused otherwise.
        let _open = fs::File::open(dir.path().join(ENROLLED_FILE)).unwrap();
        let before = inode();
        write(dir.path(), parse_names(&["shop"]), true).unwrap();
        assert_eq!(inode(), before);
    }

    #[test]
    fn a_directory_that_cannot_be_made_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let state_dir = dir.path().join("plugin");
        fs::write(&state_dir, "a file").unwrap();
        write(&state_dir, parse_names(&["shop"]), true).unwrap_err();
    }
}
