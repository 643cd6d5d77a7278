//! Reads the recorded calls in `tests/calls`.

use std::{collections::BTreeMap, fs, path::Path};

use serde::Deserialize;
use serde_json::value::RawValue;

/// The key `cniVersion` of configurations without a version, or of 0.1.0 or 0.2.0, and the version of the plugin's reply.
pub(crate) const LEGACY: [(&str, &str); 4] = [
    ("", "0.1.0"),
    (r#""cniVersion":"","#, "0.1.0"),
    (r#""cniVersion":"0.1.0","#, "0.1.0"),
    (r#""cniVersion":"0.2.0","#, "0.2.0"),
];

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Recorded {
    #[serde(skip)]
    pub(crate) name: String,
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) stdin: String,
}

impl Recorded {
    /// Finds the file by its leading number.
    pub(crate) fn number(number: &str) -> Self {
        let mut found = all()
            .into_iter()
            .filter(|call| call.name.starts_with(number));
        found.next().expect("a recorded call of that number")
    }

    pub(crate) fn var(&self, name: &str) -> &str {
        self.env.get(name).map_or("", String::as_str)
    }

    pub(crate) fn with_var(mut self, name: &str, value: &str) -> Self {
        self.env.insert(name.to_owned(), value.to_owned());
        self
    }

    /// Replaces stdin by a configuration with this version and these further keys.
    pub(crate) fn with_configuration(mut self, version: &str, keys: &str) -> Self {
        self.stdin = format!(r#"{{{version}"name":"feasnet","type":"inpod-cni"{keys}}}"#);
        self
    }

    pub(crate) fn without_var(mut self, name: &str) -> Self {
        self.env.remove(name);
        self
    }

    /// Returns a value of `CNI_ARGS`.
    pub(crate) fn arg(&self, key: &str) -> &str {
        let pairs = self.var("CNI_ARGS").split(';');
        let mut values = pairs.filter_map(|pair| pair.strip_prefix(key)?.strip_prefix('='));
        values.next().unwrap_or("")
    }

    /// Returns a value of stdin, byte for byte.
    pub(crate) fn key(&self, key: &str) -> Option<String> {
        let keys: BTreeMap<String, Box<RawValue>> = serde_json::from_str(&self.stdin).unwrap();
        keys.get(key).map(|raw| raw.get().to_owned())
    }

    pub(crate) fn is_for_a_pod(&self) -> bool {
        !self.arg("K8S_POD_NAMESPACE").is_empty()
    }
}

pub(crate) fn all() -> Vec<Recorded> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/calls");
    let mut calls: Vec<Recorded> = fs::read_dir(dir)
        .unwrap()
        .map(|file| file.unwrap().path())
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "json")
        })
        .map(|path| {
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            let call: Recorded = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
            Recorded { name, ..call }
        })
        .collect();
    calls.sort_by(|a, b| a.name.cmp(&b.name));
    calls
}

pub(crate) fn of_verb(verb: &str) -> Vec<Recorded> {
    let calls: Vec<Recorded> = all()
        .into_iter()
        .filter(|call| call.var("CNI_COMMAND") == verb)
        .collect();
    assert!(!calls.is_empty(), "{verb}");
    calls
}
