use proptest::prelude::*;

use super::*;
use crate::{INPOD_CNI, ISTIO_CNI};

const ENTRY: &str = r#"{"type":"inpod-cni","logLevel":"info"}"#;

fn plugin(text: &str) -> Plugin {
    Plugin::new(RawValue::from_string(text.to_owned()).unwrap()).unwrap()
}

fn list_of(plugins: &[&str]) -> Conflist {
    let text = format!(r#"{{"name":"n","plugins":[{}]}}"#, plugins.join(", "));
    Conflist::parse(text.as_bytes()).unwrap()
}

fn texts(content: &[u8]) -> Vec<String> {
    let list = Conflist::parse(content).unwrap();
    let texts = list
        .plugins
        .iter()
        .map(|plugin| plugin.text.get().to_owned());
    texts.collect()
}

#[test]
fn an_entry_is_appended_and_every_other_value_keeps_its_text() {
    let text = "{\r\n  \"name\": \"k8s\",\r\n  \"cniVersion\": \"0.3.1\", \"n\": 1e40,\r\n  \"plugins\": [\r\n    {\"type\": \"calico\", \"mtu\": 0e0, \"a\\/b\": 18446744073709551617},\r\n    {\"type\": \"portmap\", \"snat\": true}\r\n  ]\r\n}";
    let edited = Conflist::parse(text.as_bytes())
        .unwrap()
        .with(&plugin(ENTRY), ISTIO_CNI);
    let expected = "{\n  \"name\": \"k8s\",\n  \"cniVersion\": \"0.3.1\",\n  \"n\": 1e40,\n  \"plugins\": [\n    {\"type\": \"calico\", \"mtu\": 0e0, \"a\\/b\": 18446744073709551617},\n    {\"type\": \"portmap\", \"snat\": true},\n    {\"type\":\"inpod-cni\",\"logLevel\":\"info\"}\n  ]\n}\n";
    assert_eq!(String::from_utf8(edited).unwrap(), expected);
}

#[test]
fn a_list_with_an_equal_entry_stays_byte_for_byte() {
    let text = r#"{"name":"n","plugins":[{"type":"bridge"}, { "logLevel":"info", "type":"inpod-cni" } ,{"type":"x"}]}"#;
    let list = Conflist::parse(text.as_bytes()).unwrap();
    assert_eq!(list.with(&plugin(ENTRY), ISTIO_CNI), text.as_bytes());
}

#[test]
fn istio_cni_is_replaced_and_can_be_put_back() {
    let istio = r#"{"type":"istio-cni","x":[1,2]}"#;
    let list = list_of(&[r#"{"type":"bridge"}"#, istio]);
    let edited = list.with(&plugin(ENTRY), ISTIO_CNI);
    assert_eq!(texts(&edited), [r#"{"type":"bridge"}"#, ENTRY]);
    let back = Conflist::parse(&edited)
        .unwrap()
        .with(&plugin(istio), INPOD_CNI);
    assert_eq!(texts(&back), [r#"{"type":"bridge"}"#, istio]);
}

#[test]
fn a_list_of_inpod_alone_has_nothing_left_without_inpod() {
    assert_eq!(list_of(&[ENTRY, ENTRY]).without(INPOD_CNI), None);
    let left = list_of(&[ENTRY, r#"{"type":"x"}"#])
        .without(INPOD_CNI)
        .unwrap();
    assert_eq!(texts(&left), [r#"{"type":"x"}"#]);
}

#[test]
fn the_entry_is_placed_once_for_every_order_of_plugins() {
    let plugins = [
        ENTRY,
        r#"{ "type":"inpod-cni", "a":1 }"#,
        r#"{"type": "bridge"}"#,
        r#"{"type":"portmap"}"#,
    ];
    for (length, number) in (1..=5_u32)
        .flat_map(|length| (0..plugins.len().pow(length)).map(move |number| (length, number)))
    {
        let digits = (0..length).map(|digit| number / plugins.len().pow(digit) % plugins.len());
        let order: Vec<_> = digits.map(|digit| plugins[digit]).collect();
        let edited = list_of(&order).with(&plugin(ENTRY), ISTIO_CNI);
        // The entry keeps its first place behind another plugin, or comes last.
        let is_ours = |text: &&&str| text.contains("inpod-cni");
        let others: Vec<_> = order
            .iter()
            .filter(|text| !is_ours(text))
            .copied()
            .collect();
        let first = order.iter().position(|text| !text.contains("inpod-cni"));
        let place = first.and_then(|first| {
            let place = order
                .iter()
                .skip(first)
                .position(|text| text.contains("inpod-cni"))?;
            Some(
                order
                    .iter()
                    .take(first + place)
                    .filter(|text| !is_ours(text))
                    .count(),
            )
        });
        let mut expected = others.clone();
        expected.insert(place.unwrap_or(others.len()), ENTRY);
        assert_eq!(texts(&edited), expected, "{order:?}");
        let again = Conflist::parse(&edited)
            .unwrap()
            .with(&plugin(ENTRY), ISTIO_CNI);
        assert_eq!(again, edited);
    }
}

#[test]
fn what_runtimes_accept_in_a_list_is_accepted() {
    let text = r#"{"name":"a","name":"b","cniVersion":"0.4.0","cniVersions":["1.0.0","1.1.0"],"disableCheck":"True","loadOnlyInlinedPlugins":true,"plugins":[],"plug\u0069ns":[{"type":"x","Type":"bridge"}]}"#;
    let list = Conflist::parse(text.as_bytes()).unwrap();
    assert_eq!(
        (list.name.as_str(), list.plugins[0].kind.as_str()),
        ("b", "bridge")
    );
    assert_eq!(list.versions, ["0.4.0", "1.0.0", "1.1.0"]);
    let text = r#"{"name":"n","plugins":[{"type":"b","ipam":{},"ipam":{"type":"i"}}]}"#;
    assert!(Conflist::parse(text.as_bytes()).is_ok());
    let list = Conflist::parse(b"{\"name\":\"n\xff\",\"plugins\":[{\"type\":\"b\"}]}").unwrap();
    assert_eq!(
        (list.name.as_str(), list.versions.as_slice()),
        ("n\u{fffd}", &[String::new()][..])
    );
}

const REFUSED: &[(&str, &str)] = &[
    (
        "",
        "invalid JSON: EOF while parsing a value at line 1 column 0",
    ),
    (
        "\u{feff}{}",
        "it begins with a byte order mark, which runtimes reject; save it without one",
    ),
    (
        "[]",
        "invalid JSON: invalid type: sequence, expected a map at line 1 column 0",
    ),
    (
        r#"{"name":"n","plugins":[{"type":"b"},]}"#,
        "invalid JSON: trailing comma at line 1 column 37",
    ),
    (
        r#"{"name":"n"} {}"#,
        "invalid JSON: trailing characters at line 1 column 14",
    ),
    (r#"{"plugins":[{"type":"b"}]}"#, "it has no `name`"),
    (
        r#"{"name":1,"plugins":[{"type":"b"}]}"#,
        "`name` is not a string",
    ),
    (
        r#"{"name":"n"}"#,
        "it has no `plugins`: list its plugins there, because inpod cannot stand behind drop-in plugins",
    ),
    (r#"{"name":"n","plugins":{}}"#, "`plugins` is not a list"),
    (r#"{"name":"n","plugins":null}"#, "`plugins` is not a list"),
    (
        r#"{"name":"n","plugins":[]}"#,
        "`plugins` is not a list of at least one plugin",
    ),
    (
        r#"{"name":"n","plugins":[{"type":"b"},1]}"#,
        "plugin 1 of the list is not an object",
    ),
    (
        r#"{"name":"n","plugins":[{"type":""}]}"#,
        "plugin 0 of the list has no `type`",
    ),
    (
        r#"{"name":"n","cniVersion":1,"plugins":[{"type":"b"}]}"#,
        "`cniVersion` is not a string",
    ),
    (
        r#"{"name":"n","cniVersions":"1.0.0","plugins":[{"type":"b"}]}"#,
        "`cniVersions` is not a list of strings",
    ),
    (
        r#"{"name":"n","disableCheck":1,"plugins":[{"type":"b"}]}"#,
        "`disableCheck` is not true or false",
    ),
    (
        r#"{"name":"n","n":1e400,"plugins":[{"type":"b"}]}"#,
        "invalid JSON: number out of range at line 1 column 21",
    ),
    (
        r#"{"name":"n","cniVersions":["one"],"plugins":[{"type":"b"}]}"#,
        "`cniVersions` is not a list of versions",
    ),
    (
        r#"{"name":"n","plugins":[{"type":"b","ipam":"x"}]}"#,
        "plugin 0 of the list is invalid: invalid type: string \"x\", expected struct Ipam",
    ),
];

#[test]
fn what_runtimes_refuse_is_refused_with_its_cause() {
    for (text, expected) in REFUSED {
        let error = Conflist::parse(text.as_bytes()).unwrap_err();
        assert_eq!(error.to_string(), *expected, "{text}");
    }
}

#[test]
fn a_single_configuration_becomes_a_list_that_holds_its_text() {
    let text = "\n{ \"type\":\"bridge\",\n \"cniVersion\": \"1.0.0\", \"name\" : \"a\\u0022b\", \"mtu\": 1e40 }\n\n";
    let list = Conflist::parse_single(text.as_bytes()).unwrap();
    assert_eq!(list.name, "a\"b");
    let edited = list.with(&plugin(ENTRY), ISTIO_CNI);
    assert_eq!(texts(&edited), [text.trim(), ENTRY]);
    let edited = Conflist::parse(&edited).unwrap();
    assert_eq!((edited.name, edited.versions), (list.name, list.versions));
    let error =
        Conflist::parse_single(br#"{"name":"n","plugins":[{"type":"bridge"}]}"#).unwrap_err();
    assert_eq!(error, Malformed::ListInConf);
    let error = Conflist::parse_single(br#"{"type":"bridge"}"#).unwrap_err();
    assert_eq!(error, Malformed::Missing("name"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn an_edit_of_a_damaged_list_adds_one_entry_and_loses_no_text(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..4_u8), 0..6),
    ) {
        let mut bytes = br#" { "name":"n" ,"cniVersion": "0.3.1","x":{"a":[1e40,"\u00e9"]},
            "plugins" :[{"type":"inpod-cni"} ,{"Type":"b","n":18446744073709551617}, {"type":"c"},{"type":"istio-cni"}] } "#.to_vec();
        for (place, byte, act) in changes {
            let at = place.index(bytes.len());
            let structural = [b'{', b'}', b'[', b']', b',', b'"', b'\\', b' '];
            match act {
                0 => bytes[at] = byte,
                1 => bytes[at] = structural[usize::from(byte) % structural.len()],
                2 => bytes.insert(at, byte),
                _ => drop(bytes.remove(at)),
            }
        }
        let Ok(list) = Conflist::parse(&bytes) else { return Ok(()) };
        let edited = list.with(&plugin(ENTRY), ISTIO_CNI);
        let again = Conflist::parse(&edited).unwrap();
        prop_assert_eq!(&again.with(&plugin(ENTRY), ISTIO_CNI), &edited);
        let others = |list: &Conflist| {
            let others = list.plugins.iter().filter(|it| it.kind != INPOD_CNI && it.kind != ISTIO_CNI);
            others.map(|it| it.text.get().to_owned()).collect::<Vec<_>>()
        };
        prop_assert_eq!(others(&again), others(&list));
        prop_assert_eq!(again.plugins.iter().filter(|it| it.kind == INPOD_CNI).count(), 1);
        prop_assert_eq!((&again.name, &again.versions), (&list.name, &list.versions));
    }
}
