//! Known components that remove inpod from the chain, with a remedy for each.

use std::{fs, path::Path};

use crate::{Directory, ISTIO_CNI};

/// Recognizes the component by its files and returns the remedy; returns `None` if no known component is present.
pub fn remedy_for(directory: &Directory, others: &[String]) -> Option<&'static str> {
    let has_type = |kind: &str| {
        let mut lists = directory.files.iter().filter_map(|file| file.list());
        lists.any(|list| list.plugin(kind).is_some())
    };
    let is_named = |part: &str| {
        let files = directory.files.iter().map(|file| &file.name);
        files.chain(others).any(|name| name.contains(part))
    };
    if is_named("cilium") || has_type("cilium-cni") {
        Some("Cilium removes all other configurations: install it with cni.exclusive=false")
    } else if is_named(ISTIO_CNI) || has_type(ISTIO_CNI) {
        Some("istio-cni restores its own entry: remove the DaemonSet istio-cni-node first")
    } else if is_named("multus") || has_type("multus") {
        Some(
            "Multus writes its own file: use mode=owned with an owned_file that sorts behind it, or mode=standalone with a NetworkAttachmentDefinition",
        )
    } else if is_named("calico") || has_type("calico") {
        Some(
            "Calico's install-cni rewrites its own file: use mode=owned, which leaves that file alone",
        )
    } else {
        None
    }
}

/// Lists the files in the directory that runtimes do not load.
pub(crate) fn unloaded_names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| !crate::is_loaded(name)).collect()
}

#[cfg(test)]
mod tests {
    use crate::NetworkFile;

    use super::*;

    fn directory(name: &str, kind: &str) -> Directory {
        let text = format!(r#"{{"name":"n","plugins":[{{"type":"{kind}"}}]}}"#);
        Directory::of(vec![NetworkFile::new(name.to_owned(), text.into_bytes())])
    }

    #[test]
    fn every_known_opponent_has_its_remedy() {
        for (name, kind, word) in [
            ("05-cilium.conflist", "x", "cni.exclusive=false"),
            ("a.conflist", "cilium-cni", "cni.exclusive=false"),
            ("10-calico.conflist", "calico", "mode=owned"),
            ("00-multus.conflist", "x", "sorts behind"),
            ("a.conflist", "istio-cni", "DaemonSet istio-cni-node"),
        ] {
            assert!(
                remedy_for(&directory(name, kind), &[])
                    .unwrap()
                    .contains(word),
                "{name}"
            );
        }
        let backup = ["02-inpod.conflist.cilium_bak".to_owned()];
        assert!(
            remedy_for(&directory("a.conflist", "b"), &backup)
                .unwrap()
                .contains("Cilium")
        );
        assert_eq!(remedy_for(&directory("a.conflist", "b"), &[]), None);
    }
}
