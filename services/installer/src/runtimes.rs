//! Reads the CNI settings in the configuration files of container runtimes.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
};

use inpod_service::read_bounded_text;
use toml::{Table, Value};

use crate::directory::{MAX_BYTES, file_names, resolve};

/// The possible configuration files of containerd, in the order of the search.
const CONTAINERD: [&str; 4] = [
    "/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
    "/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
    "/var/snap/microk8s/current/args/containerd.toml",
    "/etc/containerd/config.toml",
];

/// The main configuration file of CRI-O; the files of the directory follow by name (crio.conf(5)).
const CRIO: &str = "/etc/crio/crio.conf";
const CRIO_DIR: &str = "/etc/crio/crio.conf.d";

/// The containerd plugins with a table `cni`, in versions 3, 2 and 1 of the file (containerd's page on its CRI plugin).
const CRI: [&str; 3] = [
    "io.containerd.cri.v1.runtime",
    "io.containerd.grpc.v1.cri",
    "cri",
];

/// A limit far above real configurations, since files may import each other.
const MAX_IMPORT_DEPTH: u8 = 4;

/// The settings by which a node's runtime loads networks, with paths on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runtime {
    pub conf_dir: PathBuf,
    /// The directories of plugins, in the order of the search.
    pub bin_dirs: Vec<PathBuf>,
    /// The file that sets them, or `None` for the defaults of containerd and CRI-O.
    pub source: Option<PathBuf>,
    /// The number of networks of a pod (containerd's `max_conf_num`); 0 stands for all.
    pub(crate) networks: i64,
    /// The name of the network (CRI-O's `cni_default_network`), if the first file does not decide.
    pub(crate) network: Option<String>,
    /// The CNI directories of containerd's runtime handlers with a directory of their own.
    pub(crate) handlers: BTreeMap<String, PathBuf>,
}

impl Default for Runtime {
    fn default() -> Self {
        Self {
            conf_dir: "/etc/cni/net.d".into(),
            bin_dirs: vec!["/opt/cni/bin".into()],
            source: None,
            networks: 1,
            network: None,
            handlers: BTreeMap::new(),
        }
    }
}

impl Runtime {
    fn of(source: &Path) -> Self {
        let source = Some(source.to_owned());
        Self {
            source,
            ..Self::default()
        }
    }

    /// Finds the runtime whose configuration directory is `conf_dir`, or else the first whose directory exists. Returns
    /// the files that cannot be used with the errors.
    pub fn find(root: &Path, conf_dir: Option<&Path>) -> (Self, Vec<(PathBuf, String)>) {
        let unreadable = Vec::new();
        let mut search = Search { root, unreadable };
        let paths = CONTAINERD.iter().map(Path::new);
        let mut found: Vec<_> = paths.filter_map(|it| search.containerd(it)).collect();
        found.extend(search.crio());
        let is_wanted = |runtime: &Self| match conf_dir {
            Some(dir) => runtime.conf_dir == dir,
            None => resolve(root, &runtime.conf_dir).is_ok_and(|dir| dir.is_dir()),
        };
        let index = found.iter().position(is_wanted).unwrap_or(0);
        let runtime = found.into_iter().nth(index).unwrap_or_default();
        (runtime, search.unreadable)
    }

    /// Overrides these settings with the settings of containerd's file.
    fn override_by_containerd(&mut self, file: &Table) {
        let plugins = file.get("plugins").and_then(Value::as_table);
        let cri = plugins.and_then(|plugins| CRI.iter().find_map(|name| plugins.get(*name)));
        let cni = cri.and_then(|cri| cri.get("cni"));
        let setting = |key| cni.and_then(|cni| cni.get(key));
        let mut bin_dirs = paths_of(setting("bin_dirs"));
        if bin_dirs.is_empty() {
            bin_dirs.extend(path_of(setting("bin_dir")));
        }
        self.override_dirs(path_of(setting("conf_dir")), bin_dirs);
        if let Some(networks) = setting("max_conf_num").and_then(Value::as_integer) {
            self.networks = networks;
        }
        // The CRI plugin of version 3 has the handlers beside `cni`, too.
        let handlers = cri.and_then(|cri| cri.get("containerd")?.get("runtimes")?.as_table());
        for (name, handler) in handlers.into_iter().flatten() {
            let dir = path_of(handler.get("cni_conf_dir"));
            self.handlers.extend(dir.map(|dir| (name.clone(), dir)));
        }
    }

    /// Overrides these settings with the table `crio.network` of crio.conf(5).
    fn override_by_crio(&mut self, file: &Table) {
        let network = file.get("crio").and_then(|crio| crio.get("network"));
        let setting = |key| network.and_then(|network| network.get(key));
        let mut bin_dirs = paths_of(setting("plugin_dirs"));
        bin_dirs.extend(path_of(setting("plugin_dir")));
        self.override_dirs(path_of(setting("network_dir")), bin_dirs);
        if let Some(name) = setting("cni_default_network").and_then(Value::as_str) {
            self.network = Some(name.to_owned()).filter(|name| !name.is_empty());
        }
    }

    pub(crate) fn override_dirs(&mut self, conf_dir: Option<PathBuf>, bin_dirs: Vec<PathBuf>) {
        if let Some(dir) = conf_dir {
            self.conf_dir = dir;
        }
        if !bin_dirs.is_empty() {
            self.bin_dirs = bin_dirs;
        }
    }
}

struct Search<'a> {
    root: &'a Path,
    unreadable: Vec<(PathBuf, String)>,
}

impl Search<'_> {
    fn containerd(&mut self, path: &Path) -> Option<Runtime> {
        let file = self.read(path)?;
        let disabled = file.get("disabled_plugins").and_then(Value::as_array);
        let mut disabled = disabled.into_iter().flatten().filter_map(Value::as_str);
        if disabled.any(|name| CRI.contains(&name)) {
            return None;
        }
        let mut runtime = Runtime::of(path);
        self.override_with_imports(&mut runtime, path, &file, MAX_IMPORT_DEPTH);
        Some(runtime)
    }

    fn override_with_imports(
        &mut self,
        runtime: &mut Runtime,
        path: &Path,
        file: &Table,
        depth: u8,
    ) {
        runtime.override_by_containerd(file);
        for import in paths_of(file.get("imports")) {
            for path in self.matching_files(path, &import) {
                if let Some(file) = self.read(&path).filter(|_| depth > 0) {
                    self.override_with_imports(runtime, &path, &file, depth - 1);
                }
            }
        }
    }

    fn crio(&mut self) -> Option<Runtime> {
        let mut paths = vec![PathBuf::from(CRIO)];
        paths.extend(self.list_files(Path::new(CRIO_DIR), |name| name.ends_with(".conf")));
        let mut runtime = None;
        for path in paths {
            if let Some(file) = self.read(&path) {
                let runtime = runtime.get_or_insert_with(|| Runtime::of(&path));
                let before = (runtime.conf_dir.clone(), runtime.bin_dirs.clone());
                runtime.override_by_crio(&file);
                if before != (runtime.conf_dir.clone(), runtime.bin_dirs.clone()) {
                    runtime.source = Some(path);
                }
            }
        }
        runtime
    }

    /// Returns `None` if the file does not exist or cannot be used.
    fn read(&mut self, path: &Path) -> Option<Table> {
        let text = resolve(self.root, path).and_then(|found| read_bounded_text(&found, MAX_BYTES));
        let read = match text {
            Ok(text) => text
                .parse()
                .map_err(|error: toml::de::Error| error.message().to_owned()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => Err(error.to_string()),
        };
        read.map_err(|why| self.unreadable.push((path.to_owned(), why)))
            .ok()
    }

    /// Expands an entry of `imports` to sorted files; only the last component of the path may contain `*`.
    fn matching_files(&self, file: &Path, pattern: &Path) -> Vec<PathBuf> {
        // A relative path starts at the directory of the importing file (containerd, config import).
        let pattern = file.parent().unwrap_or(file).join(pattern);
        let (Some(dir), Some(name)) = (pattern.parent(), pattern.file_name()) else {
            return Vec::new();
        };
        let name = name.to_string_lossy();
        let Some((before, after)) = name.split_once('*') else {
            return vec![pattern.clone()];
        };
        self.list_files(dir, |found| {
            let rest = found.strip_prefix(before);
            rest.is_some_and(|rest| rest.ends_with(after.trim_start_matches('*')))
        })
    }

    /// Lists the matching files of a directory, sorted by name.
    fn list_files(&self, dir: &Path, matches: impl Fn(&str) -> bool) -> Vec<PathBuf> {
        let names = resolve(self.root, dir).map(|dir| file_names(&dir));
        let names = names.into_iter().flatten();
        let matching = names.filter(|name| matches(name));
        matching.map(|name| dir.join(name)).collect()
    }
}

/// Returns the path, or `None` for an empty text, which counts as unset.
fn path_of(value: Option<&Value>) -> Option<PathBuf> {
    let text = value?.as_str()?.trim_end_matches('/');
    (!text.is_empty()).then(|| text.into())
}

fn paths_of(value: Option<&Value>) -> Vec<PathBuf> {
    let items = value.and_then(Value::as_array).into_iter().flatten();
    items.filter_map(|item| path_of(Some(item))).collect()
}

#[cfg(test)]
mod tests;
