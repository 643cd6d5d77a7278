//! Calls with an error in them.

use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::{OsStrExt as _, OsStringExt as _},
};

use integration::{Call, Outcome, Running};
use proptest::{
    prelude::*,
    sample::{Index, select},
};
use serde_json::{Value, json};

#[derive(Clone, Debug)]
pub(crate) struct Raw {
    variables: Vec<(String, Vec<u8>)>,
    pub(crate) stdin: Vec<u8>,
    arguments: Vec<OsString>,
}

#[derive(Clone, Debug)]
enum Wrong {
    /// Bytes of a variable are lost, added or changed.
    Variable(Index, Splice),
    Missing(Index),
    Path(String),
    /// Bytes of standard input are lost, added or changed.
    Stdin(Splice),
    Cut(Index),
    Key(Index, Value),
    NoKey(Index),
    Argument(Vec<u8>),
}

type Splice = (Index, usize, Vec<u8>);

fn splice(bytes: &mut Vec<u8>, (at, remove, insert): &Splice) {
    let start = at.index(bytes.len() + 1);
    let end = (start + remove).min(bytes.len());
    bytes.splice(start..end, insert.iter().copied());
}

/// Returns the key with that number, counting nested objects.
fn with_member(
    value: &mut Value,
    at: &Index,
    change: impl FnOnce(&mut serde_json::Map<String, Value>, &str),
) {
    let Value::Object(members) = value else {
        return;
    };
    let keys: Vec<String> = members.keys().cloned().collect();
    if !keys.is_empty() {
        change(members, at.get::<String>(&keys));
    }
}

impl Wrong {
    fn apply(&self, raw: &mut Raw) {
        match self {
            Self::Variable(which, change) => {
                let count = raw.variables.len();
                if let Some((_, value)) = raw.variables.get_mut(which.index(count.max(1))) {
                    splice(value, change);
                    // exec cannot pass it.
                    value.retain(|byte| *byte != 0);
                }
            }
            Self::Missing(which) => {
                if !raw.variables.is_empty() {
                    raw.variables.remove(which.index(raw.variables.len()));
                }
            }
            Self::Path(path) => {
                let netns = raw
                    .variables
                    .iter_mut()
                    .find(|(name, _)| name == "CNI_NETNS");
                if let Some((_, value)) = netns {
                    *value = path.clone().into_bytes();
                }
            }
            Self::Stdin(change) => splice(&mut raw.stdin, change),
            Self::Cut(at) => raw.stdin.truncate(at.index(raw.stdin.len() + 1)),
            Self::Key(at, value) => raw.document(|document| {
                with_member(document, at, |members, key| {
                    members.insert(key.to_owned(), value.clone());
                });
            }),
            Self::NoKey(at) => raw.document(|document| {
                with_member(document, at, |members, key| {
                    members.remove(key);
                });
            }),
            Self::Argument(bytes) => {
                let bytes = bytes.iter().copied().filter(|byte| *byte != 0).collect();
                raw.arguments.push(OsString::from_vec(bytes));
            }
        }
    }
}

impl Raw {
    pub(crate) fn of(call: Call) -> Self {
        let variables = call.environment.into_iter();
        Self {
            variables: variables
                .map(|(name, value)| (name, value.into_bytes()))
                .collect(),
            stdin: call.stdin.into_bytes(),
            arguments: Vec::new(),
        }
    }

    fn document(&mut self, change: impl FnOnce(&mut Value)) {
        if let Ok(mut document) = serde_json::from_slice(&self.stdin) {
            change(&mut document);
            self.stdin = document.to_string().into_bytes();
        }
    }

    pub(crate) fn run(&self) -> anyhow::Result<Outcome> {
        let variables = self.variables.iter();
        let variables = variables.map(|(name, value)| (OsStr::new(name), OsStr::from_bytes(value)));
        let arguments: Vec<&OsStr> = self.arguments.iter().map(OsString::as_os_str).collect();
        Running::start(variables, &self.stdin, &arguments)?.wait()
    }
}

fn values() -> impl Strategy<Value = Value> {
    prop_oneof![
        select(vec![
            json!(null),
            json!(true),
            json!(0),
            json!(-1),
            json!(1e308),
            json!(""),
            json!([]),
            json!({})
        ]),
        select(vec![
            json!([[[[[]]]]]),
            json!({"a": {"a": {"a": 1}}}),
            json!(["a", 1]),
            json!("/"),
            json!("../..")
        ]),
        ".{0,40}".prop_map(Value::String),
        (0_usize..3000).prop_map(|length| Value::String("x".repeat(length))),
    ]
}

fn wrongs(paths: Vec<String>) -> impl Strategy<Value = Vec<Wrong>> {
    let splices = || {
        (
            any::<Index>(),
            0_usize..8,
            prop::collection::vec(any::<u8>(), 0..8),
        )
    };
    let one = prop_oneof![
        4 => (any::<Index>(), splices()).prop_map(|(which, change)| Wrong::Variable(which, change)),
        1 => any::<Index>().prop_map(Wrong::Missing),
        2 => select(paths).prop_map(Wrong::Path),
        3 => splices().prop_map(Wrong::Stdin),
        1 => any::<Index>().prop_map(Wrong::Cut),
        3 => (any::<Index>(), values()).prop_map(|(at, value)| Wrong::Key(at, value)),
        1 => any::<Index>().prop_map(Wrong::NoKey),
        1 => prop::collection::vec(any::<u8>(), 0..20).prop_map(Wrong::Argument),
    ];
    prop::collection::vec(one, 1..4)
}

pub(crate) fn calls(good: Vec<Raw>, paths: Vec<String>) -> impl Strategy<Value = Raw> {
    (select(good), wrongs(paths)).prop_map(|(mut raw, wrongs)| {
        wrongs.iter().for_each(|wrong| wrong.apply(&mut raw));
        raw
    })
}
