//! A list of plugins as text, with the position of each plugin for edits.

pub(crate) mod edit;

use crate::{
    Malformed,
    json::{self, Member, Span},
};

/// A configuration list (CNI spec, "Configuration format") with the position of each plugin.
#[derive(Clone, Debug)]
pub struct Conflist {
    text: Vec<u8>,
    name: String,
    /// The position of `plugins`, including the brackets.
    plugins: Span,
    entries: Vec<PluginSpan>,
}

#[derive(Clone, Copy, Debug)]
pub struct Plugin<'a> {
    /// The `type` of the plugin, which is the name of its executable.
    pub kind: &'a str,
    /// The JSON object of the plugin, byte for byte.
    pub text: &'a [u8],
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub kind: String,
    /// The whole JSON object of the plugin.
    pub text: Vec<u8>,
}

#[derive(Clone, Debug)]
struct PluginSpan {
    span: Span,
    kind: String,
}

impl Conflist {
    /// Parses a list as libcni does (`NetworkConfFromBytes` of 1.3); if a key occurs twice, the later value wins.
    ///
    /// # Errors
    ///
    /// Fails if a runtime would reject the list, or if the list has no plugins. In the latter case libcni 1.3 loads
    /// plugins from a directory of the network's name, to which no entry can be appended.
    pub fn parse(text: &[u8]) -> Result<Self, Malformed> {
        let members = object(text)?;
        let name = last(&members, "name").ok_or(Malformed::Missing("name"))?;
        let name = json::string(text, name).ok_or_else(|| wrong_type("name", "a string"))?;
        for key in ["disableCheck", "loadOnlyInlinedPlugins"] {
            check_boolean(text, &members, key)?;
        }
        check_versions(text, &members)?;
        let plugins = last(&members, "plugins").ok_or(Malformed::Missing("plugins"))?;
        let spans = json::elements(text, plugins).ok_or_else(|| wrong_type("plugins", "a list"))?;
        if spans.is_empty() {
            return Err(wrong_type("plugins", "a list of at least one plugin"));
        }
        Ok(Self {
            name,
            plugins: plugins.clone(),
            entries: plugin_spans(text, spans)?,
            text: text.to_owned(),
        })
    }

    pub fn text(&self) -> &[u8] {
        &self.text
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn plugins(&self) -> impl Iterator<Item = Plugin<'_>> {
        self.entries.iter().map(|plugin| Plugin {
            kind: &plugin.kind,
            text: self.text.get(plugin.span.clone()).unwrap_or_default(),
        })
    }

    pub fn plugin(&self, kind: &str) -> Option<Plugin<'_>> {
        self.plugins().find(|plugin| plugin.kind == kind)
    }
}

pub(crate) fn object(text: &[u8]) -> Result<Vec<Member>, Malformed> {
    let value = json::parse_value(text)?;
    json::members(text, &value).ok_or(Malformed::NoObject)
}

/// Returns the last of equal keys, because only the last value counts.
pub(crate) fn last<'a>(members: &'a [Member], key: &str) -> Option<&'a Span> {
    let found = members.iter().rev().find(|member| member.key == key);
    found.map(|member| &member.value)
}

pub(crate) fn wrong_type(key: &'static str, expected: &'static str) -> Malformed {
    Malformed::Wrong { key, expected }
}

/// Returns the type; its key may have any case, as Go accepts for fields of structs.
pub(crate) fn kind(text: &[u8], members: &[Member]) -> Option<String> {
    let named = |member: &&Member| member.key.eq_ignore_ascii_case("type");
    let value = &members.iter().rev().find(named)?.value;
    json::string(text, value).filter(|kind| !kind.is_empty())
}

fn check_boolean(text: &[u8], members: &[Member], key: &'static str) -> Result<(), Malformed> {
    match last(members, key) {
        Some(value) if !json::is_boolean(text, value) => Err(wrong_type(key, "true or false")),
        Some(_) | None => Ok(()),
    }
}

fn check_versions(text: &[u8], members: &[Member]) -> Result<(), Malformed> {
    let is_string = |value: &Span| json::string(text, value).is_some();
    let are_strings = |list: &Span| {
        let items = json::elements(text, list);
        items.is_some_and(|items| items.iter().all(is_string))
    };
    if !last(members, "cniVersion").is_none_or(is_string) {
        return Err(wrong_type("cniVersion", "a string"));
    }
    if !last(members, "cniVersions").is_none_or(are_strings) {
        return Err(wrong_type("cniVersions", "a list of strings"));
    }
    Ok(())
}

fn plugin_spans(text: &[u8], spans: Vec<Span>) -> Result<Vec<PluginSpan>, Malformed> {
    let plugin = |(index, span): (usize, Span)| {
        let malformed = |problem| Malformed::Plugin { index, problem };
        let members = json::members(text, &span).ok_or_else(|| malformed("is not an object"))?;
        let kind = kind(text, &members).ok_or_else(|| malformed("has no `type`"))?;
        Ok(PluginSpan { span, kind })
    };
    spans.into_iter().enumerate().map(plugin).collect()
}

#[cfg(test)]
mod tests;
