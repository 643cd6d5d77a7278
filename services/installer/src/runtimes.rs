//! Reads the CNI settings in the configuration files of container runtimes.

use toml::{Table, Value};

/// The CNI settings of one file, in which unset fields are empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuntimeConfig {
    pub conf_dir: Option<String>,
    /// The directories of plugins, in the order of the search.
    pub bin_dirs: Vec<String>,
    /// The imported files (containerd's `imports`), whose names may contain `*`.
    pub imports: Vec<String>,
}

impl RuntimeConfig {
    /// Overrides these settings with the settings of a later file.
    #[must_use]
    pub fn overridden_by(mut self, later: Self) -> Self {
        self.conf_dir = later.conf_dir.or(self.conf_dir);
        if !later.bin_dirs.is_empty() {
            self.bin_dirs = later.bin_dirs;
        }
        self.imports.extend(later.imports);
        self
    }
}

/// The containerd plugins with a table `cni`, in versions 3, 2 and 1 of the file (containerd's page on its CRI plugin).
const CRI: [&str; 3] = [
    "io.containerd.cri.v1.runtime",
    "io.containerd.grpc.v1.cri",
    "cri",
];

pub fn containerd(text: &str) -> Result<RuntimeConfig, toml::de::Error> {
    let file: Table = text.parse()?;
    let plugins = file.get("plugins").and_then(Value::as_table);
    let cni = plugins.and_then(|plugins| {
        let mut known = CRI.iter().filter_map(|name| plugins.get(*name)?.get("cni"));
        known.next()
    });
    let setting = |key| cni.and_then(|cni| cni.get(key));
    let mut bin_dirs = strings_of(setting("bin_dirs"));
    if bin_dirs.is_empty() {
        bin_dirs.extend(string_of(setting("bin_dir")));
    }
    Ok(RuntimeConfig {
        conf_dir: string_of(setting("conf_dir")),
        bin_dirs,
        imports: strings_of(file.get("imports")),
    })
}

/// Parses the table `crio.network` of crio.conf(5).
pub fn crio(text: &str) -> Result<RuntimeConfig, toml::de::Error> {
    let file: Table = text.parse()?;
    let network = file.get("crio").and_then(|crio| crio.get("network"));
    let setting = |key| network.and_then(|network| network.get(key));
    let mut bin_dirs = strings_of(setting("plugin_dirs"));
    bin_dirs.extend(string_of(setting("plugin_dir")));
    Ok(RuntimeConfig {
        conf_dir: string_of(setting("network_dir")),
        bin_dirs,
        ..RuntimeConfig::default()
    })
}

/// Returns the text, or `None` for an empty string, which counts as unset.
fn string_of(value: Option<&Value>) -> Option<String> {
    let text = value?.as_str()?.trim_end_matches('/');
    (!text.is_empty()).then(|| text.to_owned())
}

fn strings_of(value: Option<&Value>) -> Vec<String> {
    let items = value.and_then(Value::as_array).into_iter().flatten();
    items.filter_map(|item| string_of(Some(item))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_version_of_containerds_configuration_is_read() {
        for (text, bins) in [
            (
                "[plugins.cri.cni]\nbin_dir = \"/b\"\nconf_dir = \"/c/\"",
                &["/b"][..],
            ),
            (
                "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".cni]\nbin_dir = \"/b\"\nconf_dir = \"/c\"",
                &["/b"],
            ),
            (
                "version = 3\n[plugins]\n  [plugins.'io.containerd.cri.v1.runtime']\n    [plugins.'io.containerd.cri.v1.runtime'.cni]\n      bin_dirs = ['/b', '/b2']\n      conf_dir = '/c'",
                &["/b", "/b2"],
            ),
        ] {
            let setting = containerd(text).unwrap();
            assert_eq!(
                (setting.conf_dir.as_deref(), &setting.bin_dirs[..]),
                (
                    Some("/c"),
                    &bins.iter().map(|b| (*b).to_owned()).collect::<Vec<_>>()[..]
                ),
                "{text}"
            );
        }
        let setting = containerd("imports = [\"/x/*.toml\"]\n[plugins.cri.cni]").unwrap();
        assert_eq!(
            (setting.imports, setting.conf_dir),
            (vec!["/x/*.toml".to_owned()], None)
        );
    }

    #[test]
    fn a_later_file_of_crio_overrides_what_it_sets_and_nothing_else() {
        let first =
            crio("[crio.network]\nnetwork_dir = \"/c\"\nplugin_dirs = [\"/a\", \"/b\"]").unwrap();
        let second = crio("[crio.network]\nnetwork_dir = \"/d\"").unwrap();
        let setting = first.overridden_by(second);
        assert_eq!(
            (setting.conf_dir.as_deref(), setting.bin_dirs),
            (Some("/d"), vec!["/a".to_owned(), "/b".to_owned()])
        );
    }

    #[test]
    fn a_file_that_is_no_toml_is_refused() {
        assert!(containerd("[plugins").is_err() && crio("= 1").is_err());
    }
}
