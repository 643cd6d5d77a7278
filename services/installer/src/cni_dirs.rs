use std::{
    fs, io,
    path::{Path, PathBuf},
};

use inpod_service::read_bounded_text;

use crate::{
    PLATFORMS, Platform, RuntimeConfig,
    directory::MAX_BYTES,
    runtimes::{containerd, crio},
};

/// The CNI directories of a container runtime, as paths on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CniDirs {
    pub conf_dir: PathBuf,
    /// The directories of plugins, in the order in which the runtime searches them.
    pub bin_dirs: Vec<PathBuf>,
    pub origin: Origin,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The configuration of a runtime names the directories; the value is the host path of the file.
    File(PathBuf),
    /// No directories are configured, but the directories of a known platform exist.
    Platform(&'static str),
    Default,
}

/// The possible configuration files of containerd, in the order of the search.
const CONTAINERD: &[&str] = &[
    "/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
    "/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
    "/var/snap/microk8s/current/args/containerd.toml",
    "/etc/containerd/config.toml",
];

/// The main configuration file of CRI-O; the files of the directory follow by name (crio.conf(5)).
const CRIO: &str = "/etc/crio/crio.conf";
const CRIO_DIR: &str = "/etc/crio/crio.conf.d";

/// Searches the runtime's configuration, then known platforms, then the defaults. If several runtimes are configured,
/// the first whose conf directory exists wins. Returns unusable files with their errors.
pub fn find_dirs(root: &Path) -> (CniDirs, Vec<(PathBuf, String)>) {
    let mut unreadable = Vec::new();
    let mut found: Vec<_> = CONTAINERD
        .iter()
        .filter_map(|path| containerd_dirs(root, Path::new(path), &mut unreadable))
        .collect();
    found.extend(crio_dirs(root, &mut unreadable));
    let there = found
        .iter()
        .position(|dirs| on_host(root, &dirs.conf_dir).is_dir());
    let dirs = match (there, found.is_empty()) {
        (Some(index), _) => found.swap_remove(index),
        (None, false) => found.swap_remove(0),
        (None, true) => platform_dirs(root),
    };
    (dirs, unreadable)
}

fn on_host(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

type Unreadable = Vec<(PathBuf, String)>;

/// Returns `None` if the file does not exist or cannot be read.
fn read_text(root: &Path, path: &Path, unreadable: &mut Unreadable) -> Option<String> {
    match read_bounded_text(&on_host(root, path), MAX_BYTES) {
        Ok(text) => Some(text),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => {
            unreadable.push((path.to_owned(), error.to_string()));
            None
        }
    }
}

fn parse_runtime_config(
    path: &Path,
    config: Result<RuntimeConfig, toml::de::Error>,
    unreadable: &mut Unreadable,
) -> Option<RuntimeConfig> {
    let why =
        |error: toml::de::Error| unreadable.push((path.to_owned(), error.message().to_owned()));
    config.map_err(why).ok()
}

fn containerd_dirs(root: &Path, path: &Path, unreadable: &mut Unreadable) -> Option<CniDirs> {
    let mut config = parse_runtime_config(
        path,
        containerd(&read_text(root, path, unreadable)?),
        unreadable,
    )?;
    for import in std::mem::take(&mut config.imports) {
        for file in matching_files(root, path, &import) {
            let more = read_text(root, &file, unreadable).map(|text| containerd(&text));
            config = match more.and_then(|more| parse_runtime_config(&file, more, unreadable)) {
                Some(more) => config.overridden_by(more),
                None => config,
            };
        }
    }
    Some(cni_dirs(config, path))
}

/// Expands an entry of `imports` to sorted files; only the last component of the path may contain `*`.
fn matching_files(root: &Path, file: &Path, pattern: &str) -> Vec<PathBuf> {
    // A relative path starts at the directory of the importing file (containerd, config import).
    let pattern = file.parent().unwrap_or(file).join(pattern);
    let (Some(dir), Some(name)) = (pattern.parent(), pattern.file_name()) else {
        return Vec::new();
    };
    let name = name.to_string_lossy();
    let Some((before, after)) = name.split_once('*') else {
        return vec![pattern.clone()];
    };
    let matches = |found: &str| {
        let rest = found.strip_prefix(before);
        rest.is_some_and(|rest| rest.ends_with(after.trim_start_matches('*')))
    };
    list_files(root, dir, matches)
}

/// Lists the matching files of a directory, sorted by name.
fn list_files(root: &Path, dir: &Path, matches: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let entries = fs::read_dir(on_host(root, dir))
        .into_iter()
        .flatten()
        .flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut names: Vec<_> = names.filter(|name| matches(name)).collect();
    names.sort();
    names.into_iter().map(|name| dir.join(name)).collect()
}

fn crio_dirs(root: &Path, unreadable: &mut Unreadable) -> Option<CniDirs> {
    let main = PathBuf::from(CRIO);
    let mut files = vec![main.clone()];
    files.extend(list_files(root, Path::new(CRIO_DIR), |name| {
        name.ends_with(".conf")
    }));
    let mut all: Option<(RuntimeConfig, PathBuf)> = None;
    for file in files {
        let Some(config) = read_text(root, &file, unreadable)
            .and_then(|text| parse_runtime_config(&file, crio(&text), unreadable))
        else {
            continue;
        };
        let sets_dirs = config.conf_dir.is_some() || !config.bin_dirs.is_empty();
        all = Some(match all {
            // The origin is the last file that sets a directory.
            Some((before, named)) => (
                before.overridden_by(config),
                if sets_dirs { file } else { named },
            ),
            None => (config, file),
        });
    }
    all.map(|(config, file)| cni_dirs(config, &file))
}

fn cni_dirs(config: RuntimeConfig, file: &Path) -> CniDirs {
    let dirs = config
        .bin_dirs
        .into_iter()
        .map(PathBuf::from)
        .collect::<Vec<_>>();
    CniDirs {
        conf_dir: config
            .conf_dir
            .map_or_else(|| default_dirs().conf_dir, PathBuf::from),
        bin_dirs: if dirs.is_empty() {
            default_dirs().bin_dirs
        } else {
            dirs
        },
        origin: Origin::File(file.to_owned()),
    }
}

fn default_dirs() -> CniDirs {
    CniDirs {
        conf_dir: PathBuf::from("/etc/cni/net.d"),
        bin_dirs: vec![PathBuf::from("/opt/cni/bin")],
        origin: Origin::Default,
    }
}

/// Requires both directories of the platform to exist, and the conf directory to differ from the default.
fn platform_dirs(root: &Path) -> CniDirs {
    let is_there = |platform: &&Platform| {
        platform.name != "default"
            && on_host(root, Path::new(platform.conf_dir)).is_dir()
            && on_host(root, Path::new(platform.bin_dir)).is_dir()
            && platform.conf_dir != "/etc/cni/net.d"
    };
    PLATFORMS
        .iter()
        .find(is_there)
        .map_or_else(default_dirs, |platform| CniDirs {
            conf_dir: PathBuf::from(platform.conf_dir),
            bin_dirs: vec![PathBuf::from(platform.bin_dir)],
            origin: Origin::Platform(platform.name),
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host_with(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = on_host(root.path(), Path::new(path));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn without_any_configuration_the_defaults_hold() {
        let (dirs, unreadable) = find_dirs(host_with(&[]).path());
        assert_eq!(dirs, default_dirs());
        assert!(unreadable.is_empty());
    }

    #[test]
    fn the_configuration_of_k3s_has_its_own_directories() {
        let conf = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".cni]\n  bin_dir = \"/var/lib/rancher/k3s/data/cni\"\n  conf_dir = \"/var/lib/rancher/k3s/agent/etc/cni/net.d\"\n";
        let root = host_with(&[
            (CONTAINERD[0], conf),
            ("/etc/containerd/config.toml", "version = 2"),
        ]);
        let (dirs, _) = find_dirs(root.path());
        assert_eq!(
            dirs.conf_dir,
            Path::new("/var/lib/rancher/k3s/agent/etc/cni/net.d")
        );
        assert_eq!(dirs.bin_dirs, [Path::new("/var/lib/rancher/k3s/data/cni")]);
        assert_eq!(dirs.origin, Origin::File(CONTAINERD[0].into()));
    }

    #[test]
    fn imports_are_followed_in_order() {
        let root = host_with(&[
            (
                "/etc/containerd/config.toml",
                "imports = [\"conf.d/*.toml\", \"/opt/one.toml\"]\n[plugins.cri.cni]\nconf_dir=\"/a\"\nbin_dir=\"/b\"",
            ),
            (
                "/etc/containerd/conf.d/2.toml",
                "[plugins.cri.cni]\nconf_dir=\"/two\"",
            ),
            (
                "/etc/containerd/conf.d/1.toml",
                "[plugins.cri.cni]\nconf_dir=\"/one\"",
            ),
            (
                "/etc/containerd/conf.d/3.conf",
                "[plugins.cri.cni]\nconf_dir=\"/three\"",
            ),
            ("/opt/one.toml", "[plugins.cri.cni]\nbin_dir=\"/last\""),
        ]);
        let (dirs, unreadable) = find_dirs(root.path());
        assert_eq!(dirs.conf_dir, Path::new("/two"));
        assert_eq!(dirs.bin_dirs, [Path::new("/last")]);
        assert!(unreadable.is_empty(), "{unreadable:?}");
    }

    #[test]
    fn crio_is_read_with_its_directory_and_a_file_that_is_no_toml_is_named() {
        let root = host_with(&[
            (
                "/etc/crio/crio.conf",
                "[crio.network]\nnetwork_dir = \"/a\"\nplugin_dirs = [\"/b\", \"/c\"]",
            ),
            (
                "/etc/crio/crio.conf.d/10-x.conf",
                "[crio.network]\nnetwork_dir = \"/x\"",
            ),
            ("/etc/crio/crio.conf.d/20-y.conf", "[broken"),
            ("/x/10-net.conflist", ""),
        ]);
        let (dirs, unreadable) = find_dirs(root.path());
        assert_eq!(dirs.conf_dir, Path::new("/x"));
        assert_eq!(dirs.bin_dirs, [Path::new("/b"), Path::new("/c")]);
        assert_eq!(unreadable.len(), 1);
        assert_eq!(
            unreadable[0].0,
            Path::new("/etc/crio/crio.conf.d/20-y.conf")
        );
    }

    #[test]
    fn of_two_runtimes_the_one_whose_directory_is_there_counts() {
        let root = host_with(&[
            (
                "/etc/containerd/config.toml",
                "[plugins.cri.cni]\nconf_dir=\"/gone\"",
            ),
            (
                "/etc/crio/crio.conf",
                "[crio.network]\nnetwork_dir = \"/there\"",
            ),
            ("/there/10-net.conflist", ""),
        ]);
        assert_eq!(find_dirs(root.path()).0.conf_dir, Path::new("/there"));
    }

    #[test]
    fn a_platform_whose_directories_are_there_is_recognised() {
        let platform = Platform::named("microk8s").unwrap();
        let root = host_with(&[
            (&format!("{}/10-calico.conflist", platform.conf_dir), ""),
            (&format!("{}/calico", platform.bin_dir), ""),
        ]);
        let (dirs, _) = find_dirs(root.path());
        assert_eq!(dirs.origin, Origin::Platform("microk8s"));
        assert_eq!(dirs.conf_dir, Path::new(platform.conf_dir));
    }
}
