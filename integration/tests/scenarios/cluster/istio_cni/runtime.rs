//! The chain as a runtime executes it: the first file's plugins after the pod's network.

use std::{
    fs,
    io::Write as _,
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Context as _, ensure};
use integration::{Call, Pod};
use serde_json::{Value, json};

use crate::common::cluster::Cluster;

/// The conflist of the primary CNI.
pub(crate) const PRIMARY: &str =
    r#"{"cniVersion":"1.0.0","name":"podnet","plugins":[{"type":"bridge"},{"type":"portmap"}]}"#;

/// Plugins whose work the harness has done.
const DONE: [&str; 2] = ["bridge", "portmap"];

pub(crate) struct Runtime<'a> {
    pub(crate) cluster: &'a Cluster,
    /// Contains `etc/cni/net.d` and `opt/cni/bin`.
    pub(crate) host: PathBuf,
}

impl Runtime<'_> {
    pub(crate) fn files(&self) -> Vec<(String, String)> {
        let entries = fs::read_dir(self.host.join("etc/cni/net.d")).unwrap();
        let read = |entry: fs::DirEntry| {
            let name = entry.file_name().into_string().unwrap();
            (name, fs::read_to_string(entry.path()).unwrap())
        };
        let mut files: Vec<_> = entries.map(|entry| read(entry.unwrap())).collect();
        files.retain(|(name, _)| name.ends_with(".conflist"));
        files.sort();
        files
    }

    fn list(&self) -> anyhow::Result<Value> {
        let files = self.files();
        let (_, text) = files.first().context("no network")?;
        Ok(serde_json::from_str(text)?)
    }

    pub(crate) fn chain(&self) -> Vec<String> {
        let list = self.list().unwrap();
        let plugins = list.pointer("/plugins").and_then(Value::as_array).unwrap();
        let kind = |plugin: &Value| plugin.get("type")?.as_str().map(str::to_owned);
        plugins.iter().filter_map(kind).collect()
    }

    pub(crate) fn add(&self, pod: &Pod) -> anyhow::Result<()> {
        let list = self.list()?;
        let plugins = list.pointer("/plugins").and_then(Value::as_array);
        for plugin in plugins.context("no plugins")? {
            let kind = plugin.get("type").and_then(Value::as_str);
            let kind = kind.context("a plugin has a type")?;
            if !DONE.contains(&kind) {
                self.execute(kind, plugin, &list, pod)?;
            }
        }
        Ok(())
    }

    fn execute(&self, kind: &str, plugin: &Value, list: &Value, pod: &Pod) -> anyhow::Result<()> {
        let path = self.host.join("opt/cni/bin").join(kind);
        ensure!(path.is_file(), "failed to find plugin {kind:?}");
        let call = self.cluster.node.call(Call::add, pod);
        let asked: Value = serde_json::from_str(&call.stdin)?;
        let mut stdin = plugin.clone();
        let keys = stdin.as_object_mut().context("an object")?;
        for (key, from) in [("name", list), ("cniVersion", list), ("prevResult", &asked)] {
            keys.insert(
                key.to_owned(),
                from.get(key).unwrap_or(&json!(null)).clone(),
            );
        }
        let net = format!("--net={}", self.cluster.node.netns().path().display());
        let mut child = Command::new("nsenter")
            .arg(net)
            .arg(path)
            .env_clear()
            .envs(call.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut input = child.stdin.take().context("its input")?;
        input.write_all(stdin.to_string().as_bytes())?;
        drop(input);
        let output = child.wait_with_output()?;
        let said = [output.stdout, output.stderr].concat();
        ensure!(
            output.status.success(),
            "{kind}: {}",
            String::from_utf8_lossy(&said)
        );
        Ok(())
    }
}
