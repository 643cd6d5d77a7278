use super::*;

fn constants() -> Vec<(&'static str, &'static str)> {
    let files = [
        include_str!("ambient.rs"),
        include_str!("injection.rs"),
        include_str!("ours.rs"),
        include_str!("sidecar.rs"),
    ];
    let lines = files.into_iter().flat_map(str::lines);
    let text = |line: &'static str| {
        let (name, text) = line.strip_prefix("pub const ")?.split_once(": &str = \"")?;
        Some((name, text.strip_suffix("\";")?))
    };
    lines.filter_map(text).collect()
}

#[test]
fn every_constant_is_a_key_of_the_table_or_a_value_of_one() {
    let constants = constants();
    assert!(constants.len() > 60, "{constants:?}");
    for (constant, text) in constants {
        let is_key = table().any(|key| key.name == text);
        let value = format!("`{text}`");
        let is_value = table().any(|key| key.values.contains(&value));
        let is_either = is_key || is_value && !text.contains('/');
        assert!(is_either, "{constant} = {text}");
    }
}

#[test]
fn every_key_of_the_table_has_one_constant_and_stands_on_an_object_once_for_each_component() {
    let constants = constants();
    for (at, key) in table().enumerate() {
        let named = constants.iter().filter(|(_, text)| *text == key.name);
        assert_eq!(named.count(), 1, "{}", key.name);
        let same = |other: &&Key| {
            (other.name, other.location, other.by) == (key.name, key.location, key.by)
        };
        assert_eq!(table().take(at).find(same), None, "{}", key.name);
    }
}
