//! Meta plugins (Multus and its kin), which call other networks' plugins instead of making a network. A copy of such a
//! list would make the meta plugin call itself, so inpod joins the network that the meta plugin calls.

use std::path::Path;

use serde_json::{Value, value::to_raw_value};

use crate::{Conflist, INPOD_CNI, Plugin};

/// The beginnings of types of meta plugins whose configuration need not show the called network.
const KINDS: [&str; 5] = ["multus", "danm", "genie", "galaxy-sdn", "knitter"];

impl Conflist {
    /// Returns the type of the list's meta plugin, if the network of the list is made by one.
    pub fn meta(&self) -> Option<&str> {
        let first = self.plugins.first()?;
        let calls_others = || {
            let text = value(first);
            text.get("delegates").is_some_and(Value::is_array)
                || text.get("clusterNetwork").is_some()
        };
        let is_known = KINDS.iter().any(|kind| first.kind.starts_with(kind));
        let is_meta = is_known || calls_others();
        is_meta.then_some(first.kind.as_str())
    }

    /// Returns inpod's entries, including the entries of networks that a meta plugin holds inline.
    pub fn calls(&self) -> Vec<Plugin> {
        let mut calls = Vec::new();
        for plugin in &self.plugins {
            if plugin.kind == INPOD_CNI {
                calls.push(plugin.clone());
            } else if self.meta().is_some() {
                let mut text = value(plugin);
                // Multus calls the one or the other.
                if let Some(members) = text.as_object_mut()
                    && members.contains_key("clusterNetwork")
                {
                    members.remove("delegates");
                }
                let inline = take_calls(&mut text).into_iter();
                calls.extend(inline.filter_map(|call| Plugin::new(to_raw_value(&call).ok()?).ok()));
            }
        }
        calls
    }

    /// Returns the name of the file in `conf_dir` with the network that the meta plugin calls (`clusterNetwork` of Multus,
    /// a path in the mount namespace of Multus).
    pub fn called_file(&self, conf_dir: &Path) -> Option<String> {
        let text = value(self.plugins.first()?);
        let path = Path::new(text.get("clusterNetwork")?.as_str()?);
        let dir = conf_dir.strip_prefix("/").unwrap_or(conf_dir);
        let name = path
            .file_name()
            .filter(|_| path.parent().is_some_and(|it| it.ends_with(dir)));
        Some(name?.to_string_lossy().into_owned())
    }

    /// Returns the file without inpod in what the meta plugin calls, with `primary` instead of inpod's file, or `None` if
    /// nothing is left to change.
    pub(crate) fn without_calls(&self, own: &Path, primary: Option<&str>) -> Option<Vec<u8>> {
        let first = self.plugins.first().filter(|_| self.meta().is_some())?;
        let mut text = value(first);
        let mut is_changed = !take_calls(&mut text).is_empty();
        let called = own.parent().and_then(|dir| self.called_file(dir));
        let is_own = own
            .file_name()
            .is_some_and(|name| called.is_some_and(|it| *name == *it));
        if let Some(primary) = primary.filter(|_| is_own) {
            let called = text.get_mut("clusterNetwork")?;
            let path = Path::new(called.as_str()?).with_file_name(primary);
            *called = path.to_str()?.into();
            is_changed = true;
        }
        if !is_changed {
            return None;
        }
        let text = to_raw_value(&text).ok()?;
        if self.is_single {
            return Some(format!("{text}\n").into_bytes());
        }
        let kind = first.kind.clone();
        let first = Plugin { kind, text };
        let others = self.plugins.iter().skip(1);
        let plugins: Vec<_> = [&first].into_iter().chain(others).collect();
        Some(self.render(&plugins))
    }
}

/// Returns the JSON, or null for a number beyond f64, which no meta plugin writes.
fn value(plugin: &Plugin) -> Value {
    serde_json::from_str(plugin.text.get()).unwrap_or_default()
}

fn is_call(value: &Value) -> bool {
    value.get("type").and_then(Value::as_str) == Some(INPOD_CNI)
}

/// Removes inpod's entries from all lists, and returns the entries.
fn take_calls(value: &mut Value) -> Vec<Value> {
    match value {
        Value::Array(items) => {
            let mut calls: Vec<_> = items.extract_if(.., |item| is_call(item)).collect();
            calls.extend(items.iter_mut().flat_map(take_calls));
            calls
        }
        Value::Object(members) => members.values_mut().flat_map(take_calls).collect(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => Vec::new(),
    }
}
