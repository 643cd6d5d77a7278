//! A list of plugins, parsed as runtimes do. Values stay the text of their owner, so that an edit changes no number.

use std::collections::BTreeMap;

use indexmap::IndexMap;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{
    Value, json,
    value::{RawValue, to_raw_value},
};

use crate::Malformed;

/// The members of an object in order. The last of equal keys counts, as in Go's encoding/json.
type Members = IndexMap<String, Box<RawValue>>;

/// A configuration list (CNI spec, "Configuration format").
#[derive(Clone, Debug)]
pub struct Conflist {
    pub name: String,
    pub plugins: Vec<Plugin>,
    /// True if the file holds a single plugin, from which runtimes make the list.
    pub is_single: bool,
    /// The versions from which the runtime selects one: `cniVersion`, empty if missing, and `cniVersions`.
    pub(crate) versions: Vec<String>,
    members: Members,
    content: Vec<u8>,
}

#[derive(Clone, Debug)]
pub struct Plugin {
    /// The `type`: the name of the executable.
    pub kind: String,
    /// The JSON object.
    pub text: Box<RawValue>,
}

/// The fields that libcni reads in the configuration of each plugin (`types.PluginConf`), with their types.
#[expect(dead_code, reason = "only the types are checked")]
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
struct Conf {
    #[serde(rename = "type")]
    kind: Option<String>,
    #[serde(rename = "cniversion")]
    cni_version: Option<String>,
    name: Option<String>,
    capabilities: Option<BTreeMap<String, Option<bool>>>,
    ipam: Option<Ipam>,
    dns: Option<Dns>,
    #[serde(rename = "prevresult")]
    prev_result: Option<BTreeMap<String, Value>>,
}

#[expect(dead_code, reason = "only the types are checked")]
#[derive(Deserialize)]
struct Ipam {
    #[serde(rename = "type")]
    kind: Option<String>,
}

#[expect(dead_code, reason = "only the types are checked")]
#[derive(Deserialize)]
struct Dns {
    nameservers: Option<Vec<Option<String>>>,
    domain: Option<String>,
    search: Option<Vec<Option<String>>>,
    options: Option<Vec<Option<String>>>,
}

impl Conflist {
    /// Parses a list as libcni does (`NetworkConfFromBytes` of 1.3).
    ///
    /// # Errors
    ///
    /// Fails if a runtime would reject the list, or if the list has no plugins: libcni 1.3 then loads the plugins from a
    /// directory of the network's name, and an entry in the list would come before those files.
    pub fn parse(content: &[u8]) -> Result<Self, Malformed> {
        let members = members_of(content)?;
        let plugins: Option<Vec<Box<RawValue>>> = member(&members, "plugins", "a list")?;
        let plugins = plugins.ok_or(Malformed::NoPlugins)?;
        if plugins.is_empty() {
            return Err(wrong("plugins", "a list of at least one plugin"));
        }
        for key in ["disableCheck", "disableGC", "loadOnlyInlinedPlugins"] {
            check_boolean(&members, key)?;
        }
        let plugins = plugins.into_iter().enumerate().map(|(index, text)| {
            Plugin::new(text).map_err(|problem| Malformed::Plugin { index, problem })
        });
        Self::of(members, plugins.collect(), content)
    }

    /// Parses a single plugin into a list, as runtimes do (libcni, `ConfListFromConf`).
    ///
    /// # Errors
    ///
    /// Fails if a runtime would reject the plugin, or if `name` is missing, which every call needs.
    pub fn parse_single(content: &[u8]) -> Result<Self, Malformed> {
        let mut members = members_of(content)?;
        let plugin = RawValue::from_string(String::from_utf8_lossy(content).trim().to_owned());
        let plugin = plugin.map_err(|error| Malformed::Json(error.to_string()))?;
        let plugin = match Plugin::new(plugin) {
            Ok(plugin) => plugin,
            Err(_) if members.contains_key("plugins") => return Err(Malformed::ListInConf),
            Err(problem) => return Err(Malformed::Plugin { index: 0, problem }),
        };
        members.retain(|key, _| matches!(key.as_str(), "name" | "cniVersion"));
        let list = Self::of(members, Ok(vec![plugin]), content)?;
        Ok(Self {
            is_single: true,
            ..list
        })
    }

    fn of(
        members: Members,
        plugins: Result<Vec<Plugin>, Malformed>,
        content: &[u8],
    ) -> Result<Self, Malformed> {
        Ok(Self {
            name: member(&members, "name", "a string")?.ok_or(Malformed::Missing("name"))?,
            versions: versions(&members)?,
            plugins: plugins?,
            is_single: false,
            members,
            content: content.to_owned(),
        })
    }

    /// Returns the list without the `cniVersions` that are not in `spoken`, because a later libcni may select these.
    pub(crate) fn speaking(&self, spoken: &[String]) -> Self {
        let mut list = self.clone();
        let more = self.versions.iter().skip(1);
        let known: Vec<_> = more.filter(|it| spoken.contains(it)).collect();
        if known.len() + 1 < self.versions.len() {
            let known = to_raw_value(&known).unwrap_or_default();
            list.members.insert("cniVersions".to_owned(), known);
            list.content = list.format(list.plugins.iter().map(|it| it.text.get()));
        }
        list
    }

    pub fn plugin(&self, kind: &str) -> Option<&Plugin> {
        self.plugins.iter().find(|plugin| plugin.kind == kind)
    }

    /// Returns the list with `entry` once and without plugins of the type `removed`. The entry keeps a place behind
    /// the plugin of the network, and is appended otherwise.
    pub(crate) fn with(&self, entry: &Plugin, removed: &str) -> Vec<u8> {
        let mut plugins: Vec<&Plugin> = Vec::new();
        let mut is_placed = false;
        for plugin in self.plugins.iter().filter(|plugin| plugin.kind != removed) {
            if plugin.kind != entry.kind {
                plugins.push(plugin);
            } else if !is_placed && !plugins.is_empty() {
                is_placed = true;
                let is_equal = plugin.is_equal(entry);
                plugins.push(if is_equal { plugin } else { entry });
            }
        }
        if !is_placed {
            plugins.push(entry);
        }
        self.render(&plugins)
    }

    /// Returns the list without plugins of a type, or `None` if no plugin is left.
    pub(crate) fn without(&self, kind: &str) -> Option<Vec<u8>> {
        let plugins: Vec<_> = self.plugins.iter().filter(|it| it.kind != kind).collect();
        (!plugins.is_empty()).then(|| self.render(&plugins))
    }

    /// Returns the content of a file with these plugins, byte for byte the present content if the plugins are the same.
    pub(crate) fn render(&self, plugins: &[&Plugin]) -> Vec<u8> {
        let texts = plugins.iter().map(|plugin| plugin.text.get());
        let present = self.plugins.iter().map(|plugin| plugin.text.get());
        if !self.is_single && present.eq(texts.clone()) {
            return self.content.clone();
        }
        self.format(texts)
    }

    fn format<'a>(&self, plugins: impl Iterator<Item = &'a str>) -> Vec<u8> {
        let members = self.members.iter().filter(|(key, _)| *key != "plugins");
        let members = members.map(|(key, value)| format!("  {}: {value},\n", json!(key)));
        let members: String = members.collect();
        let plugins = plugins.collect::<Vec<_>>().join(",\n    ");
        format!("{{\n{members}  \"plugins\": [\n    {plugins}\n  ]\n}}\n").into_bytes()
    }
}

impl Plugin {
    /// Reads the fields of the configuration that libcni reads.
    pub(crate) fn new(text: Box<RawValue>) -> Result<Self, String> {
        let members: IndexMap<String, Value> =
            serde_json::from_str(text.get()).map_err(|_| "is not an object".to_owned())?;
        // Go ignores the case of these keys, and takes the last of equal ones.
        let members = members
            .into_iter()
            .map(|(key, value)| (key.to_ascii_lowercase(), value));
        let conf: Conf = serde_json::from_value(members.collect())
            .map_err(|error| format!("is invalid: {error}"))?;
        let kind = conf.kind.filter(|kind| !kind.is_empty());
        let kind = kind.ok_or_else(|| "has no `type`".to_owned())?;
        Ok(Self { kind, text })
    }

    /// Compares the JSON regardless of white space and the order of keys.
    pub(crate) fn is_equal(&self, other: &Self) -> bool {
        let value = |plugin: &Self| serde_json::from_str::<Value>(plugin.text.get()).ok();
        self.text.get() == other.text.get()
            || value(self).is_some_and(|one| Some(one) == value(other))
    }
}

fn members_of(content: &[u8]) -> Result<Members, Malformed> {
    if content.starts_with(b"\xef\xbb\xbf") {
        return Err(Malformed::ByteOrderMark);
    }
    // Go replaces invalid UTF-8 in strings, too.
    let text = String::from_utf8_lossy(content);
    // Go refuses a number beyond f64, wherever the number is.
    let checked = serde_json::from_str::<Value>(&text);
    checked
        .and_then(|_| serde_json::from_str(&text))
        .map_err(|error| Malformed::Json(error.to_string()))
}

/// Returns a member of an object, or `None` if there is none.
fn member<T: DeserializeOwned>(
    members: &Members,
    key: &'static str,
    expected: &'static str,
) -> Result<Option<T>, Malformed> {
    let value = members.get(key);
    let value = value.map(|value| serde_json::from_str(value.get()));
    value.transpose().map_err(|_| wrong(key, expected))
}

fn versions(members: &Members) -> Result<Vec<String>, Malformed> {
    let mut versions = vec![member(members, "cniVersion", "a string")?.unwrap_or_default()];
    let more: Option<Vec<String>> = member(members, "cniVersions", "a list of strings")?;
    if let Some(more) = more {
        versions.extend(more);
        if !versions.iter().all(|version| is_version(version)) {
            return Err(wrong("cniVersions", "a list of versions"));
        }
    }
    Ok(versions)
}

/// Accepts the same as libcni (`ParseVersion`): an empty text, or up to three numbers.
fn is_version(text: &str) -> bool {
    let mut parts = text.split('.');
    text.is_empty() || (parts.clone().count() <= 3 && parts.all(|part| part.parse::<u32>().is_ok()))
}

/// Accepts the same as libcni: `true`, `false`, and both as strings.
fn check_boolean(members: &Members, key: &'static str) -> Result<(), Malformed> {
    let text = members.get(key).map_or("true", |value| value.get());
    match text.trim_matches('"').to_ascii_lowercase().as_str() {
        "true" | "false" => Ok(()),
        _ => Err(wrong(key, "true or false")),
    }
}

fn wrong(key: &'static str, expected: &'static str) -> Malformed {
    Malformed::Wrong { key, expected }
}

#[cfg(test)]
mod tests;
