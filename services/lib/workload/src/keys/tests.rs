use super::*;

/// The texts of all constants of this file, as `(name, text)`.
fn constants() -> Vec<(&'static str, &'static str)> {
    let lines = include_str!("../keys.rs").lines();
    let text = |line: &'static str| {
        let (name, text) = line.strip_prefix("pub const ")?.split_once(": &str = \"")?;
        Some((name, text.strip_suffix("\";")?))
    };
    lines.filter_map(text).collect()
}

#[test]
fn every_constant_is_a_key_of_the_table_or_a_value_of_one() {
    let constants = constants();
    assert!(constants.len() > 20, "{constants:?}");
    for (constant, text) in constants {
        let is_key = TABLE.iter().any(|key| key.name == text);
        let value = format!("`{text}`");
        let is_value = TABLE.iter().any(|key| key.values.contains(&value));
        assert!(
            if text.contains('/') { is_key } else { is_value },
            "{constant} = {text}"
        );
    }
}

#[test]
fn every_key_of_the_table_has_a_constant_and_stands_on_an_object_once() {
    let constants = constants();
    for (at, key) in TABLE.iter().enumerate() {
        assert!(
            constants.iter().any(|(_, text)| *text == key.name),
            "{}",
            key.name
        );
        let same = |other: &&Key| (other.name, other.on) == (key.name, key.on);
        assert_eq!(TABLE.iter().take(at).find(same), None, "{}", key.name);
    }
}
