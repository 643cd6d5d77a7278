//! Only `inpod_types::keys` contains names of labels and annotations.
#![expect(clippy::unwrap_used, reason = "a test that fails panics")]

use std::{
    fs,
    path::{Path, PathBuf},
};

use inpod_types::keys;

/// Labels and annotations that inpod reads or writes.
const DOMAINS: [&str; 2] = ["istio.io/", "inpod.io/"];

/// The directory of the table.
const TABLE: &str = "services/lib/inpod-types/src/keys";

/// Returns the shipped sources of the plugin and services, without their tests and the table.
fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if path.is_dir() {
            if name != "tests" && !path.ends_with(TABLE) {
                sources(&path, found);
            }
        } else if name.ends_with(".rs") && name != "tests.rs" {
            found.push(path);
        }
    }
}

/// Returns literals of the shipped part, each on one line, without comments.
fn literals(text: &str) -> Vec<&str> {
    let shipped = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
    let code = shipped.lines().map(|line| {
        let is_comment = line.trim_start().starts_with("//");
        if is_comment { "" } else { line }
    });
    code.flat_map(|line| line.split('"').skip(1).step_by(2))
        .collect()
}

/// Returns names in a text that contain a domain.
fn keys_in(text: &str) -> Vec<&str> {
    let is_other = |c: char| !(c.is_ascii_alphanumeric() || "./-".contains(c));
    let words = text.split(is_other).map(|word| word.trim_end_matches('.'));
    let is_key = |word: &&str| DOMAINS.iter().any(|domain| word.contains(domain));
    words.filter(is_key).collect()
}

/// Services' names as reporters of Events are no keys.
const REPORTERS: [&str; 2] = ["inpod.io/pod-events", "inpod.io/repair"];

/// Returns a literal's fault: it is a key, or a sentence with a key that is not in the table.
fn wrong(literal: &str) -> Option<String> {
    let is_sentence = literal.contains(' ');
    let unknown = |key: &&str| !keys::table().any(|known| known.name == *key);
    match keys_in(literal).as_slice() {
        [] => None,
        [name] if REPORTERS.contains(name) => None,
        [key, ..] if !is_sentence => Some(format!("spells {key}")),
        keys => keys
            .iter()
            .copied()
            .find(unknown)
            .map(|key| format!("names {key}, which is not in the table")),
    }
}

#[test]
fn nobody_but_the_table_spells_a_key() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut files = Vec::new();
    for part in ["services", "plugin"] {
        sources(&root.join(part), &mut files);
    }
    assert!(files.len() > 100, "{}", files.len());
    let mut found = Vec::new();
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        let wrong = literals(&text).into_iter().filter_map(wrong);
        found.extend(wrong.map(|wrong| format!("{} {wrong}", file.display())));
    }
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn a_key_that_is_spelled_or_made_up_is_found() {
    let found = |text: &str| {
        let found = literals(text).into_iter().filter_map(wrong);
        found.collect::<Vec<_>>()
    };
    let spelled = "let mode = labels.get(\"istio.io/dataplane-mode\");";
    assert_eq!(found(spelled), ["spells istio.io/dataplane-mode"]);
    let prefixed = "x(\"sidecar.istio.io/status\");";
    assert_eq!(found(prefixed), ["spells sidecar.istio.io/status"]);
    let made_up = "y(\"Set inpod.io/allowed on it.\");";
    assert_eq!(
        found(made_up),
        ["names inpod.io/allowed, which is not in the table"]
    );
    for fine in [
        "/// \"istio.io/dataplane-mode\"",
        "z(\"Label it istio.io/dataplane-mode=ambient.\");",
        "#[cfg(test)]\nmod tests {\n x(\"istio.io/rev\");",
    ] {
        assert_eq!(found(fine), [""; 0], "{fine}");
    }
}
