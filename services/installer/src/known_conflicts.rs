//! Known components that remove inpod from the chain, with a remedy for each.

use crate::{Directory, ISTIO_CNI, NetworkFile};

/// The part of the names of a component's files, the type of its plugin, and the remedy.
const REMEDIES: [(&str, &str, &str); 4] = [
    (
        "cilium",
        "cilium-cni",
        "Cilium removes all other configurations: install it with cni.exclusive=false",
    ),
    (
        ISTIO_CNI,
        ISTIO_CNI,
        "istio-cni restores its own entry: remove the DaemonSet istio-cni-node first",
    ),
    (
        "multus",
        "multus",
        "Multus writes its own file: use mode=owned with an owned_file that sorts behind it, or mode=standalone with a NetworkAttachmentDefinition",
    ),
    (
        "calico",
        "calico",
        "Calico's install-cni rewrites its own file: use mode=owned, which leaves that file alone",
    ),
];

const UNKNOWN: &str =
    "find the component that writes to the directory (inotifywait, auditd) and stop it";

/// Recognizes the component by the names of all files and by the networks, and returns the remedy.
pub fn remedy_for(directory: &Directory, names: &[String]) -> &'static str {
    let is_present = |(part, kind, _): &&(&str, &str, &str)| {
        let mut lists = directory.files.iter().filter_map(NetworkFile::list);
        let is_named = names.iter().any(|name| name.contains(part));
        is_named || lists.any(|list| list.plugin(kind).is_some())
    };
    let known = REMEDIES.iter().find(is_present);
    known.map_or(UNKNOWN, |(_, _, remedy)| remedy)
}

#[cfg(test)]
mod tests {
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
            let remedy = remedy_for(&directory(name, kind), &[name.to_owned()]);
            assert!(remedy.contains(word), "{name}: {remedy}");
        }
        let backup = ["02-inpod.conflist.cilium_bak".to_owned()];
        let unknown = directory("a.conflist", "b");
        assert!(remedy_for(&unknown, &backup).contains("Cilium"));
        assert_eq!(remedy_for(&unknown, &[]), UNKNOWN);
    }
}
