//! The page of labels and annotations, against the constants of the code.

use std::collections::BTreeSet;

use crate::read;

/// Returns the values of the constants, each as the page quotes it.
fn constants() -> Vec<String> {
    let code = read("services/lib/inpod-types/src/keys.rs");
    let lines = code.lines().filter_map(|it| it.strip_prefix("pub const "));
    let values = lines.filter_map(|it| it.split_once(" = \"")?.1.strip_suffix("\";"));
    values.map(|value| format!("`{value}`")).collect()
}

/// Returns the cells of each row: key, object, use by inpod, values and effect.
fn rows() -> Vec<[String; 5]> {
    let page = read("deploy/docs/labels.md");
    let rows = page.lines().filter(|line| line.starts_with("| `"));
    let cells = rows.map(|row| row.trim_matches(['|', ' ']).split(" | "));
    cells
        .map(|cells| cells.map(str::to_owned).collect::<Vec<_>>())
        .map(|cells| cells.try_into().unwrap())
        .collect()
}

#[test]
fn every_constant_is_a_key_of_the_page_or_a_value_of_one() {
    let (constants, rows) = (constants(), rows());
    assert!(constants.len() > 60, "{constants:?}");
    for constant in constants {
        let is_key = rows.iter().any(|[key, ..]| *key == constant);
        let is_value = rows.iter().any(|row| row[3].contains(&constant));
        assert!(is_key || is_value && !constant.contains('/'), "{constant}");
    }
}

#[test]
fn every_row_has_one_constant_and_is_the_only_one_for_its_use() {
    let constants = constants();
    let mut uses = BTreeSet::new();
    for [key, object, access, ..] in rows() {
        let same = constants.iter().filter(|constant| **constant == key);
        assert_eq!(same.count(), 1, "{key}");
        let (_, component) = access.rsplit_once(" by ").unwrap();
        let row = (key, object, component.to_owned());
        assert!(uses.insert(row.clone()), "{row:?}");
    }
}
