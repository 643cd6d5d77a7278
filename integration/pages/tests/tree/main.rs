//! Checks of files against each other: pages, chart, manifests, crates. Needs neither root nor helm.
//!
//! Of each container in `deploy/manifests`: no capability, mount, verb, host path or token beyond the table that the pages
//! show. Each file's digest proves its source.
#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "a test that fails panics"
)]

mod api;
mod chart;
mod crates;
mod images;
mod injector;
mod labels;
mod links;
mod monitoring;
mod pages;
mod probes;
mod rights;
mod table;

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;

fn root() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    root.canonicalize().unwrap()
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn yaml(text: &str) -> Value {
    serde_saphyr::from_str(text).unwrap()
}

fn objects(name: &str) -> Vec<Value> {
    let text = read(&format!("deploy/manifests/{name}.yaml"));
    let documents = text.split("\n---\n").skip(1);
    documents.map(yaml).collect()
}

fn manifests() -> Vec<String> {
    let names = fs::read_dir(root().join("deploy/manifests")).unwrap();
    let mut names: Vec<_> = names
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .map(|name| name.strip_suffix(".yaml").unwrap().to_owned())
        .collect();
    names.sort();
    names
}

fn text<'a>(value: &'a Value, pointer: &str) -> &'a str {
    let found = value.pointer(pointer).and_then(Value::as_str);
    found.unwrap_or_else(|| panic!("no text at {pointer} of {value}"))
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().map_or(&[], Vec::as_slice)
}

fn words(value: &Value) -> Vec<&str> {
    let items = value.as_array().map_or(&[][..], Vec::as_slice);
    items.iter().map(|item| item.as_str().unwrap()).collect()
}
