//! Edits of a list that keep all other bytes unchanged.

use serde_json::Value;

use super::{Conflist, Entry};
use crate::json::Span;

struct Splice {
    span: Span,
    by: Vec<u8>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum PluginEdit<'a> {
    Keep,
    Cut,
    Replace(&'a [u8]),
}

impl Conflist {
    /// Replaces the plugin of the entry's type behind the first plugin. Without such a plugin, appends the entry, with
    /// the white space that precedes the last plugin. An equal entry keeps its formatting.
    pub fn with(&self, entry: &Entry) -> Vec<u8> {
        self.edit(&[], Some(entry))
    }

    /// Removes the plugins of a type; the result may be an empty list, which runtimes reject.
    pub fn without(&self, kind: &str) -> Vec<u8> {
        self.edit(&[kind], None)
    }

    /// Returns the text with the entry in place of all plugins of the given type.
    pub fn replaced(&self, kind: &str, entry: &Entry) -> Vec<u8> {
        self.edit(&[kind], Some(entry))
    }

    fn edit(&self, remove: &[&str], put: Option<&Entry>) -> Vec<u8> {
        let (edits, append) = self.plugin_edits(remove, put);
        let mut splices = self.cuts(&edits);
        if let Some(entry) = append {
            splices.push(self.insertion(&edits, entry));
        }
        splice(&self.text, splices)
    }

    fn plugin_edits<'a>(
        &self,
        remove: &[&str],
        put: Option<&'a Entry>,
    ) -> (Vec<PluginEdit<'a>>, Option<&'a Entry>) {
        let is_removed = |kind: &str| remove.contains(&kind);
        let is_target = |kind: &str| put.is_some_and(|entry| entry.kind == kind);
        // The first plugin creates the network, so inpod's entry may be first only if there is no other plugin.
        let is_kept = |kind: &str| !is_removed(kind) && !is_target(kind);
        let mut is_behind_another = !self.plugins().any(|plugin| is_kept(plugin.kind));
        let mut is_placed = false;
        let edits = self.plugins().map(|plugin| {
            if is_removed(plugin.kind) {
                return PluginEdit::Cut;
            }
            match put {
                Some(entry) if is_target(plugin.kind) => {
                    if is_placed || !is_behind_another {
                        return PluginEdit::Cut;
                    }
                    is_placed = true;
                    if json_eq(plugin.text, &entry.text) {
                        PluginEdit::Keep
                    } else {
                        PluginEdit::Replace(&entry.text)
                    }
                }
                Some(_) | None => {
                    is_behind_another = true;
                    PluginEdit::Keep
                }
            }
        });
        let edits = edits.collect();
        (edits, put.filter(|_| !is_placed))
    }

    fn cuts(&self, edits: &[PluginEdit<'_>]) -> Vec<Splice> {
        let mut splices = Vec::new();
        let mut end = None;
        let mut plugins = self.entries.iter().zip(edits).peekable();
        let mut is_any_kept = false;
        while let Some((plugin, edit)) = plugins.next() {
            let next = plugins.peek().map(|(next, _)| next.span.start);
            match (edit, end) {
                (PluginEdit::Keep, _) => is_any_kept = true,
                (PluginEdit::Replace(text), _) => {
                    is_any_kept = true;
                    splices.push(Splice {
                        span: plugin.span.clone(),
                        by: text.to_vec(),
                    });
                }
                // Cuts the comma before the plugin, or the comma after the plugin if no plugin before it is kept.
                (PluginEdit::Cut, Some(end)) if is_any_kept => {
                    splices.push(removal(end..plugin.span.end));
                }
                (PluginEdit::Cut, _) => {
                    splices.push(removal(plugin.span.start..next.unwrap_or(plugin.span.end)));
                }
            }
            end = Some(plugin.span.end);
        }
        splices
    }

    fn insertion(&self, edits: &[PluginEdit<'_>], entry: &Entry) -> Splice {
        let kept = self
            .entries
            .iter()
            .zip(edits)
            .rev()
            .find(|(_, edit)| **edit != PluginEdit::Cut);
        let Some((last, _)) = kept else {
            let at = self.plugins.start + 1;
            return Splice {
                span: at..at,
                by: entry.text.clone(),
            };
        };
        let at = last.span.end;
        let by = [b",", self.whitespace_before(last.span.start), &entry.text].concat();
        Splice { span: at..at, by }
    }

    fn whitespace_before(&self, at: usize) -> &[u8] {
        let before = self.text.get(..at).unwrap_or_default();
        let is_blank = |byte: &&u8| matches!(byte, b' ' | b'\t' | b'\n' | b'\r');
        let length = before.iter().rev().take_while(is_blank).count();
        before.get(at - length..).unwrap_or_default()
    }
}

/// Compares two JSON texts regardless of white space and the order of keys.
pub fn json_eq(one: &[u8], other: &[u8]) -> bool {
    if one == other {
        return true;
    }
    let read = |text| serde_json::from_slice::<Value>(text).ok();
    read(one).is_some_and(|one| Some(one) == read(other))
}

fn removal(span: Span) -> Splice {
    Splice {
        span,
        by: Vec::new(),
    }
}

fn splice(text: &[u8], mut splices: Vec<Splice>) -> Vec<u8> {
    splices.sort_by_key(|splice| (splice.span.start, splice.span.end));
    let mut output = Vec::with_capacity(text.len());
    let mut at = 0;
    for Splice { span, by } in splices {
        output.extend_from_slice(text.get(at..span.start).unwrap_or_default());
        output.extend_from_slice(&by);
        at = span.end;
    }
    output.extend_from_slice(text.get(at..).unwrap_or_default());
    output
}
