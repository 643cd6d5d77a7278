//! Edits of a list's text that keep all other bytes.

use serde_json::Value;

use super::{Conflist, Entry};
use crate::json::Span;

/// A part of the text and its replacement.
struct Splice {
    span: Span,
    by: Vec<u8>,
}

/// Edit of one plugin.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PluginEdit<'a> {
    Keep,
    Cut,
    Replace(&'a [u8]),
}

impl Conflist {
    /// Returns the text with an entry: in place of a plugin of its type behind the first plugin, else appended with the
    /// white space that precedes the last one. An equal entry keeps its formatting.
    pub fn with(&self, entry: &Entry) -> Vec<u8> {
        self.edit(&[], Some(entry))
    }

    /// Returns the text without the plugins of a type. The result may be an empty list, which runtimes reject.
    pub fn without(&self, kind: &str) -> Vec<u8> {
        self.edit(&[kind], None)
    }

    /// Returns the text with an entry and without the plugins of a type.
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

    /// Returns the edit of each plugin, and the entry to append.
    fn plugin_edits<'a>(
        &self,
        remove: &[&str],
        put: Option<&'a Entry>,
    ) -> (Vec<PluginEdit<'a>>, Option<&'a Entry>) {
        let is_removed = |kind: &str| remove.contains(&kind);
        let is_target = |kind: &str| put.is_some_and(|entry| entry.kind == kind);
        // The first plugin creates the network, so that an entry of inpod must not be the first unless it
        // is the only one.
        let first = usize::from(self.entries.iter().any(|plugin| !is_target(&plugin.kind)));
        let mut target = None;
        let edits = self.plugins().enumerate().map(|(index, plugin)| {
            if is_removed(plugin.kind) {
                return PluginEdit::Cut;
            }
            match put {
                Some(entry) if is_target(plugin.kind) => {
                    if target.is_some() || index < first {
                        return PluginEdit::Cut;
                    }
                    target = Some(index);
                    if json_eq(plugin.text, &entry.text) {
                        PluginEdit::Keep
                    } else {
                        PluginEdit::Replace(&entry.text)
                    }
                }
                Some(_) | None => PluginEdit::Keep,
            }
        });
        let edits = edits.collect();
        (edits, put.filter(|_| target.is_none()))
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
                // Removes the comma before the plugin, or the one after it if no plugin before it is kept.
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

    /// Returns the white space that ends at a position.
    fn whitespace_before(&self, at: usize) -> &[u8] {
        let before = self.text.get(..at).unwrap_or_default();
        let is_blank = |byte: &&u8| matches!(byte, b' ' | b'\t' | b'\n' | b'\r');
        let length = before.iter().rev().take_while(is_blank).count();
        before.get(at - length..).unwrap_or_default()
    }
}

/// Returns whether two JSON texts are equal, ignoring white space and the order of keys.
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

/// Replaces parts of a text, which must not overlap.
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
