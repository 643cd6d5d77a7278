//! Reads network configurations like container runtimes: libcni loads `.conf`, `.conflist` and `.json` files in the
//! order of their names. containerd uses the first file and fails if the file is invalid; CRI-O continues with the next
//! file.

use inpod_types::with_causes;
pub(crate) use installer::INPOD_CNI as PLUGIN;
use installer::{Directory, NetworkFile};

use crate::host_fs::{HostFs, Observed};

const OTHER_MESH_PLUGINS: [&str; 5] = [
    "istio-cni",
    "linkerd-cni",
    "kuma-cni",
    "consul-cni",
    "kmesh-cni",
];

#[derive(Clone, Debug)]
pub(crate) struct Chain {
    /// The directory of the network configurations.
    pub(crate) directory: String,
    /// The directory of the plugins' binaries.
    pub(crate) plugins: String,
    pub(crate) source: String,
    /// The configurations in the order of their names, or `None` if the directory does not exist.
    pub(crate) networks: Observed<Option<Vec<Network>>>,
    pub(crate) renamed: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Network {
    pub(crate) file: String,
    /// The types of the plugins in the order of their calls, or the reason why the file is invalid.
    pub(crate) plugins: Result<Vec<String>, String>,
}

impl Network {
    /// Counts how often the chain calls inpod-cni.
    pub(crate) fn calls(&self) -> usize {
        let plugins = self.plugins.as_deref().unwrap_or_default();
        plugins.iter().filter(|it| *it == PLUGIN).count()
    }

    /// Returns whether inpod-cni is the only plugin of the network.
    pub(crate) fn is_ours_alone(&self) -> bool {
        matches!(self.plugins.as_deref(), Ok([one]) if one == PLUGIN)
    }

    pub(crate) fn agents(&self) -> Vec<&str> {
        let plugins = self.plugins.as_deref().unwrap_or_default();
        let plugins = plugins.iter().map(String::as_str);
        plugins
            .filter(|it| OTHER_MESH_PLUGINS.contains(it))
            .collect()
    }

    /// Returns whether the first plugin is a meta plugin, which selects another network by its own rules.
    pub(crate) fn is_meta(&self) -> bool {
        let plugins = self.plugins.as_deref().unwrap_or_default();
        plugins.first().is_some_and(|it| it.starts_with("multus"))
    }
}

pub(crate) fn networks(root: &HostFs, directory: &str) -> Observed<Option<Vec<Network>>> {
    if root.names(directory)?.is_none() {
        return Ok(None);
    }
    let read = Directory::read(&root.at("/"), directory.as_ref());
    let read = read.map_err(|error| with_causes(&error))?;
    let networks = read.files.iter().map(|file| Network {
        plugins: plugins(file, &read, directory),
        file: file.name.clone(),
    });
    Ok(Some(networks.collect()))
}

/// Lists the files renamed by Cilium because of the setting `cni.exclusive`.
pub(crate) fn renamed(root: &HostFs, directory: &str) -> Vec<String> {
    let names = root.names(directory).ok().flatten().unwrap_or_default();
    let is_renamed = |name: &String| name.ends_with(".cilium_bak");
    names.into_iter().filter(is_renamed).collect()
}

/// Returns the types of the plugins, behind a meta plugin also the types of inpod's entries in the networks that the meta
/// plugin calls.
fn plugins(file: &NetworkFile, directory: &Directory, path: &str) -> Result<Vec<String>, String> {
    let list = file.loaded.as_ref().map_err(ToString::to_string)?;
    let called = list.called_file(path.as_ref());
    let called = called.and_then(|name| directory.file(&name)?.list());
    let mut kinds: Vec<_> = list.plugins.iter().map(|it| it.kind.clone()).collect();
    let calls = list.calls().len() + called.map_or(0, |called| called.calls().len());
    let visible = kinds.iter().filter(|kind| *kind == PLUGIN).count();
    kinds.extend(std::iter::repeat_n(PLUGIN.to_owned(), calls - visible));
    Ok(kinds)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn networks_are_read_in_the_order_of_their_names_and_what_is_none_says_why() {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in [
            (
                "10-b.conflist",
                r#"{"name":"b","plugins":[{"type":"bridge"},{"type":"inpod-cni"}]}"#,
            ),
            ("05-a.conf", r#"{"name":"a","type":"ptp"}"#),
            ("06-x.conflist", "{"),
            ("07-y.conflist", r#"{"name":"y","plugins":[]}"#),
            ("08-z.conflist", r#"{"name":"z","plugins":[{"name":"x"}]}"#),
            ("09-z.json", "{}"),
            ("inpod.conflist.cilium_bak", "{}"),
            (
                "11-multus.conf",
                r#"{"name":"m","type":"multus","delegates":[{"plugins":[{"type":"inpod-cni"}]}]}"#,
            ),
            (
                "12-multus.conf",
                r#"{"name":"m","type":"multus-shim","clusterNetwork":"/host/10-b.conflist"}"#,
            ),
            ("readme", ""),
        ] {
            fs::write(dir.path().join(name), text).unwrap();
        }
        let root = HostFs::new(dir.path());
        let networks = networks(&root, "/").unwrap().unwrap();
        let files: Vec<_> = networks.iter().map(|it| it.file.as_str()).collect();
        assert_eq!(
            files,
            [
                "05-a.conf",
                "06-x.conflist",
                "07-y.conflist",
                "08-z.conflist",
                "09-z.json",
                "10-b.conflist",
                "11-multus.conf",
                "12-multus.conf"
            ]
        );
        for multus in &networks[6..] {
            assert_eq!((multus.calls(), multus.is_meta()), (1, true), "{multus:?}");
        }
        assert_eq!(networks[0].plugins, Ok(vec!["ptp".to_owned()]));
        assert!(networks[1..5].iter().all(|it| it.plugins.is_err()));
        assert_eq!(
            (networks[5].calls(), networks[5].is_ours_alone()),
            (1, false)
        );
        assert_eq!(renamed(&root, "/"), ["inpod.conflist.cilium_bak"]);
        assert_eq!(super::networks(&root, "/none"), Ok(None));
    }
}
