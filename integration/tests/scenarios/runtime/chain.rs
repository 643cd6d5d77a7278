//! A node's CNI chain: plugins, conflist, and host-local's allocations.

use std::{
    fs, io,
    net::IpAddr,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use integration::{Node, bin, run};
use serde_json::{Value, json};

pub(crate) const NETWORK: &str = "podnet";

pub(crate) const PRIMARY: &str = "10-podnet.conflist";

const OTHERS: [&str; 4] = ["bridge", "host-local", "portmap", "loopback"];

/// The directory of Debian's package containernetworking-plugins.
const PLUGINS: &str = "/usr/lib/cni";

/// Directories of plugins, conflists and addresses on one node.
#[derive(Debug)]
pub(crate) struct Chain {
    dir: PathBuf,
    ours: Value,
}

impl Chain {
    /// Installs bridge, host-local, portmap, ours, and their conflist.
    pub(crate) fn install(node: &Node, dir: &Path) -> anyhow::Result<Self> {
        let ours = json!({
            "type": "inpod-cni",
            "agentSocket": inpod_service::socket(&node.run_dir(), "pod-events"),
            "stateDir": node.state_dir(),
        });
        let chain = Self {
            dir: dir.to_owned(),
            ours,
        };
        fs::create_dir_all(chain.plugins())?;
        fs::create_dir_all(chain.lists())?;
        for plugin in OTHERS {
            symlink(
                Path::new(PLUGINS).join(plugin),
                chain.plugins().join(plugin),
            )?;
        }
        chain.install_ours()?;
        chain.configure(&[])?;
        Ok(chain)
    }

    pub(crate) fn plugins(&self) -> PathBuf {
        self.dir.join("bin")
    }

    pub(crate) fn lists(&self) -> PathBuf {
        self.dir.join("net.d")
    }

    pub(crate) fn install_ours(&self) -> anyhow::Result<()> {
        Ok(symlink(
            bin("inpod-cni")?,
            self.plugins().join("inpod-cni"),
        )?)
    }

    pub(crate) fn remove_ours(&self) -> anyhow::Result<()> {
        Ok(fs::remove_file(self.plugins().join("inpod-cni"))?)
    }

    /// Returns our conflist entry with additional keys.
    fn entry(&self, keys: &[(&str, Value)]) -> Value {
        let mut entry = self.ours.clone();
        if let Some(entry) = entry.as_object_mut() {
            entry.extend(
                keys.iter()
                    .map(|(key, value)| ((*key).to_owned(), value.clone())),
            );
        }
        entry
    }

    pub(crate) fn configure(&self, keys: &[(&str, Value)]) -> anyhow::Result<()> {
        self.write(PRIMARY, &self.list("1.0.0", Some(keys)))
    }

    /// Returns the conflist as its owner writes it, or with our entry and additional keys. Its address range differs
    /// from that of the harness's own pods.
    pub(crate) fn list(&self, version: &str, ours: Option<&[(&str, Value)]>) -> Value {
        let mut plugins = vec![
            json!({"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true, "ipam": {
                "type": "host-local", "dataDir": self.dir.join("ipam"),
                "ranges": [[{"subnet": "10.77.0.0/16", "rangeStart": "10.77.200.1"}],
                           [{"subnet": "fd77::/64", "rangeStart": "fd77::c801"}]],
                "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
            }}),
            json!({"type": "portmap", "capabilities": {"portMappings": true}}),
        ];
        plugins.extend(ours.map(|keys| self.entry(keys)));
        json!({"cniVersion": version, "name": NETWORK, "plugins": plugins})
    }

    /// Writes a conflist with only our plugin and its own network.
    pub(crate) fn configure_alone(
        &self,
        network: &str,
        version: &str,
        keys: &[(&str, Value)],
    ) -> anyhow::Result<()> {
        let entry = self.entry(keys);
        let list = json!({"cniVersion": version, "name": network, "plugins": [entry]});
        self.write("20-alone.conflist", &list)
    }

    /// Runs a line of sh before a plugin.
    pub(crate) fn precede(&self, plugin: &str, line: &str) -> anyhow::Result<()> {
        let path = self.plugins().join(plugin);
        let real = fs::read_link(&path)?;
        fs::remove_file(&path)?;
        let script = format!("#!/bin/sh\n{line}\nexec {}\n", real.display());
        fs::write(&path, script)?;
        Ok(fs::set_permissions(
            &path,
            fs::Permissions::from_mode(0o755),
        )?)
    }

    pub(crate) fn with_plugins_of(&self, directory: &Path) -> anyhow::Result<()> {
        for plugin in OTHERS {
            let path = self.plugins().join(plugin);
            fs::remove_file(&path)?;
            symlink(directory.join(plugin), path)?;
        }
        Ok(())
    }

    /// Writes and renames within the directory: containerd 1.6 does not notice a file moved in from elsewhere
    /// (pkg/cri/server/cni_conf_syncer.go ignores inotify's creations).
    pub(crate) fn write(&self, name: &str, list: &Value) -> anyhow::Result<()> {
        let (path, aside) = (self.lists().join(name), self.lists().join("aside.tmp"));
        fs::write(&aside, list.to_string())?;
        Ok(fs::rename(aside, path)?)
    }

    /// host-local has one file for each address.
    pub(crate) fn addresses(&self) -> anyhow::Result<Vec<IpAddr>> {
        let files = match fs::read_dir(self.dir.join("ipam").join(NETWORK)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            files => files.context("host-local's directory")?,
        };
        let names = files.map(|file| anyhow::Ok(file?.file_name()));
        let names: Vec<_> = names.collect::<Result<_, _>>()?;
        let parsed = names.iter().filter_map(|name| name.to_str()?.parse().ok());
        Ok(parsed.collect())
    }
}

pub(crate) fn within(netns: &Path, command: &[&str]) -> anyhow::Result<String> {
    let net = format!("--net={}", netns.display());
    run("nsenter", &[&[net.as_str()], command].concat())
}

/// Counts the plugin's entries for the agent.
pub(crate) fn spooled(node: &Node) -> usize {
    fs::read_dir(node.state_dir().join("spool")).map_or(0, Iterator::count)
}

pub(crate) fn veths(node: &Node) -> anyhow::Result<Vec<String>> {
    let links = within(
        node.netns().path(),
        &["ip", "-j", "link", "show", "master", "cni0"],
    )?;
    let links: Vec<Value> = serde_json::from_str(&links)?;
    let names = links.iter().filter_map(|link| link.get("ifname")?.as_str());
    Ok(names.map(str::to_owned).collect())
}
