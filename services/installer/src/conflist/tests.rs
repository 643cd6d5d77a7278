use proptest::prelude::*;
use serde_json::value::RawValue;

use super::*;
use crate::{Conf, INPOD_CNI, ISTIO_CNI};

fn ours(text: &str) -> Entry {
    Entry {
        kind: INPOD_CNI.to_owned(),
        text: text.as_bytes().to_owned(),
    }
}

fn entry() -> Entry {
    ours(r#"{"type":"inpod-cni","logLevel":"info"}"#)
}

fn parse(text: &str) -> Conflist {
    Conflist::parse(text.as_bytes()).unwrap()
}

fn utf8(text: &[u8]) -> &str {
    std::str::from_utf8(text).unwrap()
}

const CALICO: &str = "{\r\n  \"name\": \"k8s-pod-network\",\r\n  \"cniVersion\": \"0.3.1\",\r\n  \"plugins\": [\r\n    {\"type\": \"calico\", \"mtu\": 0e0, \"a\\/b\": 1e400},\r\n    {\"type\": \"portmap\", \"snat\": true}\r\n  ]\r\n}";

#[test]
fn an_entry_goes_last_with_the_white_space_of_the_list_and_everything_else_stays() {
    let edited = parse(CALICO).with(&entry());
    let expected = CALICO.replace(
        "\"snat\": true}",
        "\"snat\": true},\r\n    {\"type\":\"inpod-cni\",\"logLevel\":\"info\"}",
    );
    assert_eq!(utf8(&edited), expected);
    let back = parse(utf8(&edited)).without(INPOD_CNI);
    assert_eq!(utf8(&back), CALICO);
}

#[test]
fn an_equal_entry_keeps_its_formatting_and_another_one_is_replaced_in_place() {
    let text = r#"{"name":"n","plugins":[{"type":"bridge"}, { "logLevel":"info", "type":"inpod-cni" } ,{"type":"linkerd-cni"}]}"#;
    assert_eq!(utf8(&parse(text).with(&entry())), text);
    let other = ours(r#"{"type":"inpod-cni"}"#);
    let expected = r#"{"name":"n","plugins":[{"type":"bridge"}, {"type":"inpod-cni"} ,{"type":"linkerd-cni"}]}"#;
    assert_eq!(utf8(&parse(text).with(&other)), expected);
}

#[test]
fn an_entry_stands_once_and_never_before_the_plugin_that_makes_the_network() {
    let text = r#"{"name":"n","plugins":[{"type":"inpod-cni"},{"type":"bridge"},{"type":"inpod-cni","a":1},{"type":"inpod-cni"}]}"#;
    let expected =
        r#"{"name":"n","plugins":[{"type":"bridge"},{"type":"inpod-cni","logLevel":"info"}]}"#;
    assert_eq!(utf8(&parse(text).with(&entry())), expected);
    let text = r#"{"name":"n","plugins":[{"type":"inpod-cni"}, {"type":"bridge"}]}"#;
    let expected =
        r#"{"name":"n","plugins":[{"type":"bridge"}, {"type":"inpod-cni","logLevel":"info"}]}"#;
    assert_eq!(
        utf8(&parse(text).with(&entry())).replace(",{", ", {"),
        expected
    );
}

fn entry_of(plugin: Plugin<'_>) -> Entry {
    Entry {
        kind: plugin.kind.to_owned(),
        text: plugin.text.to_owned(),
    }
}

#[test]
fn two_entries_before_the_first_plugin_become_one_behind() {
    let text =
        r#"{"name":"n","plugins":[{"type":"inpod-cni"},{"type":"inpod-cni"},{"type":"bridge"}]}"#;
    let expected =
        r#"{"name":"n","plugins":[{"type":"bridge"},{"type":"inpod-cni","logLevel":"info"}]}"#;
    assert_eq!(utf8(&parse(text).with(&entry())), expected);
}

#[test]
fn istio_cni_is_replaced_in_one_edit() {
    let text = r#"{"name":"n","plugins":[{"type":"bridge"},{"type":"istio-cni","x":[1,2]}]}"#;
    let expected =
        r#"{"name":"n","plugins":[{"type":"bridge"},{"type":"inpod-cni","logLevel":"info"}]}"#;
    assert_eq!(utf8(&parse(text).replaced(ISTIO_CNI, &entry())), expected);
    let back = entry_of(parse(text).plugin(ISTIO_CNI).unwrap());
    assert_eq!(utf8(&parse(expected).replaced(INPOD_CNI, &back)), text);
}

#[test]
fn an_entry_may_stand_alone() {
    let equal = r#"{"name":"n","plugins":[ { "logLevel":"info", "type":"inpod-cni" } ]}"#;
    assert_eq!(utf8(&parse(equal).with(&entry())), equal);
    let other = r#"{"name":"n","plugins":[ {"type":"istio-cni"} ]}"#;
    let expected = r#"{"name":"n","plugins":[{"type":"inpod-cni","logLevel":"info"}  ]}"#;
    assert_eq!(utf8(&parse(other).replaced(ISTIO_CNI, &entry())), expected);
}

#[test]
fn a_list_of_nothing_else_becomes_empty() {
    let text = r#"{"name":"n","plugins":[ {"type":"inpod-cni"},{"type":"inpod-cni"} ]}"#;
    assert_eq!(
        utf8(&parse(text).without(INPOD_CNI)),
        r#"{"name":"n","plugins":[  ]}"#
    );
}

#[test]
fn of_equal_keys_the_last_one_counts_as_it_does_for_runtimes() {
    let text =
        r#"{"name":"a","name":"b","plugins":[],"plug\u0069ns":[{"type":"x","Type":"bridge"}]}"#;
    let list = parse(text);
    assert_eq!(list.name(), "b");
    assert_eq!(list.plugins().next().unwrap().kind, "bridge");
    let edited = list.with(&entry());
    assert!(utf8(&edited).starts_with(r#"{"name":"a","name":"b","plugins":[],"plug"#));
}

#[test]
fn what_runtimes_accept_in_a_list_is_accepted() {
    let text = r#"{"name":"n","cniVersion":"0.4.0","cniVersions":["1.0.0","1.1.0"],"disableCheck":"True","loadOnlyInlinedPlugins":true,"plugins":[{"type":"b"}]}"#;
    assert_eq!(parse(text).name(), "n");
}

#[test]
fn what_runtimes_refuse_is_refused_with_its_cause() {
    for (text, expected) in [
        ("", "invalid JSON: line 1: unexpected end, expected a value"),
        (
            "\u{feff}{}",
            "it begins with a byte order mark, which runtimes reject; save it without one",
        ),
        ("[]", "it is not a JSON object"),
        ("{}", "it has no `name`"),
        (r#"{"name":1}"#, "`name` is not a string"),
        (r#"{"name":"n"}"#, "it has no `plugins`"),
        (r#"{"name":"n","plugins":{}}"#, "`plugins` is not a list"),
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
            r#"{"name":"n","disableCheck":1,"plugins":[{"type":"b"}]}"#,
            "`disableCheck` is not true or false",
        ),
    ] {
        let error = Conflist::parse(text.as_bytes()).unwrap_err();
        assert_eq!(error.to_string(), expected, "{text}");
    }
}

fn blank() -> impl Strategy<Value = String> {
    prop_oneof![4 => Just(String::new()), 1 => "[ \t\r\n]{1,6}"]
}

fn string() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        6 => "[a-zA-Z0-9 _./:-]{0,6}",
        1 => Just("\\u00e9\\n\\\\".to_owned()),
        1 => Just("\\ud83d\\ude00\\/".to_owned()),
        1 => Just("\\ud800".to_owned()),
        1 => Just("{[\\\"plugins\\\":,}]é".to_owned()),
    ];
    piece.prop_map(|text| format!("\"{text}\""))
}

fn scalar() -> impl Strategy<Value = String> {
    let number = prop::sample::select(vec![
        "0",
        "-0",
        "1e400",
        "18446744073709551616",
        "0.10",
        "1E+2",
        "-1.5e-9",
        "true",
        "false",
        "null",
    ]);
    prop_oneof![number.prop_map(str::to_owned), string()]
}

fn listed(open: char, items: Vec<(String, String, String)>, close: char) -> String {
    let items: Vec<_> = items
        .into_iter()
        .map(|(before, item, after)| format!("{before}{item}{after}"))
        .collect();
    format!("{open}{}{close}", items.join(","))
}

fn value() -> impl Strategy<Value = String> {
    scalar().prop_recursive(4, 24, 4, |inner| {
        let item = (blank(), inner.clone(), blank());
        let member = (blank(), string(), blank(), inner);
        prop_oneof![
            prop::collection::vec(item, 0..4).prop_map(|items| listed('[', items, ']')),
            prop::collection::vec(member, 0..4).prop_map(|members| {
                let members = members.into_iter();
                let items =
                    members.map(|(a, key, b, value)| (a, format!("{key}{b}:{value}"), b.clone()));
                listed('{', items.collect(), '}')
            }),
        ]
    })
}

fn object_with(needed: Vec<String>) -> impl Strategy<Value = String> {
    let other = (blank(), "[k-m]{1,3}", blank(), value());
    (
        prop::collection::vec(other, 0..4),
        blank(),
        any::<prop::sample::Index>(),
    )
        .prop_map(move |(others, space, place)| {
            let mut members: Vec<_> = others
                .into_iter()
                .map(|(a, key, b, value)| (a, format!("\"{key}\"{b}:{value}"), b.clone()))
                .collect();
            let at = place.index(members.len() + 1);
            let needed = needed
                .iter()
                .map(|member| (space.clone(), member.clone(), space.clone()));
            members.splice(at..at, needed);
            listed('{', members, '}')
        })
}

fn plugin() -> impl Strategy<Value = (String, String, String)> {
    let kind = prop::sample::select(vec![
        "bridge",
        "portmap",
        INPOD_CNI,
        ISTIO_CNI,
        "calico",
        "linkerd-cni",
    ]);
    let plugin = kind.prop_flat_map(|kind| object_with(vec![format!("\"type\": \"{kind}\"")]));
    (blank(), plugin, blank())
}

fn conflist() -> impl Strategy<Value = String> {
    let version = prop::sample::select(vec![
        "\"cniVersion\":\"0.3.1\"",
        "\"cniVersion\" : \"0.4.0\"",
        "\"cniVersion\":\"1.0.0\"",
        "\"cniVersions\":[\"1.0.0\" ,\"1.1.0\"]",
        "\"disableCheck\":true",
    ]);
    (
        prop::collection::vec(plugin(), 1..5),
        version,
        blank(),
        blank(),
    )
        .prop_flat_map(|(plugins, version, before, after)| {
            let plugins = format!("\"plugins\" :{}", listed('[', plugins, ']'));
            let needed = vec![version.to_owned(), "\"name\":\"n\"".to_owned(), plugins];
            object_with(needed).prop_map(move |object| format!("{before}{object}{after}"))
        })
}

/// Asserts that an edit adds inpod's entry and changes nothing else in the list.
fn holds(text: &[u8]) -> Result<(), TestCaseError> {
    let Ok(list) = Conflist::parse(text) else {
        // A list that runtimes reject stays unchanged.
        return Ok(());
    };
    let edited = list.with(&entry());
    let again = Conflist::parse(&edited).map_err(|error| TestCaseError::fail(error.to_string()))?;
    prop_assert_eq!(
        &again.with(&entry()),
        &edited,
        "a second edit changes nothing"
    );
    let types = |list: &Conflist| list.plugins().map(entry_of).collect::<Vec<_>>();
    let mut expected = types(&list);
    expected.retain(|plugin| plugin.kind != INPOD_CNI);
    let mut found = types(&again);
    let mine: Vec<_> = found
        .extract_if(.., |plugin| plugin.kind == INPOD_CNI)
        .collect();
    prop_assert_eq!(mine.len(), 1);
    let first = again.plugins().next().map(entry_of);
    prop_assert!(
        found.is_empty() || first.is_some_and(|plugin| plugin.kind != INPOD_CNI),
        "another plugin creates the network"
    );
    prop_assert_eq!(
        found,
        expected,
        "every other plugin is as it was, byte for byte"
    );
    if list.plugin(INPOD_CNI).is_none() {
        prop_assert_eq!(
            &again.without(INPOD_CNI)[..],
            text,
            "taken out again, nothing is left of it"
        );
    }
    if let Ok(json) = std::str::from_utf8(&edited) {
        prop_assert!(serde_json::from_str::<&RawValue>(json).is_ok(), "{}", json);
    }
    let bare = list.without(ISTIO_CNI);
    if let Ok(bare) = Conflist::parse(&bare) {
        prop_assert!(bare.plugin(ISTIO_CNI).is_none());
    }
    Ok(())
}

/// Returns where the entry belongs among the other plugins: where it stands behind one of them, otherwise last.
fn expected_order<'a>(texts: &[&'a str], own: &[&str], entry: &'a str) -> Vec<&'a str> {
    let is_own = |text: &&str| own.contains(text);
    let first = texts.iter().position(|text| !is_own(text));
    let behind = first.map_or(0, |first| first + 1);
    let place = texts.iter().skip(behind).position(is_own);
    let before = texts
        .iter()
        .take(place.map_or(texts.len(), |place| behind + place));
    let mut order: Vec<_> = texts.iter().copied().filter(|text| !is_own(text)).collect();
    let at = before.filter(|text| !is_own(text)).count();
    order.insert(at, entry);
    order
}

#[test]
fn an_entry_stands_once_and_in_its_place_whatever_the_order() {
    let entry = entry();
    let entry_text = utf8(&entry.text);
    let own = [entry_text, r#"{ "type":"inpod-cni", "a":1 }"#];
    let plugins = [
        own[0],
        own[1],
        r#"{"type": "bridge"}"#,
        r#"{"type":"portmap"}"#,
    ];
    for (length, number) in (1..=5_u32)
        .flat_map(|length| (0..plugins.len().pow(length)).map(move |number| (length, number)))
    {
        let digits = (0..length).map(|digit| number / plugins.len().pow(digit) % plugins.len());
        let texts: Vec<_> = digits.map(|digit| plugins[digit]).collect();
        let text = format!(r#"{{"name":"n","plugins":[{}]}}"#, texts.join(", "));
        holds(text.as_bytes()).unwrap();
        let edited = parse(&text).with(&entry);
        let edited = Conflist::parse(&edited).unwrap();
        let found: Vec<_> = edited.plugins().map(|plugin| utf8(plugin.text)).collect();
        assert_eq!(found, expected_order(&texts, &own, entry_text), "{text}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_thousand_lists_lose_no_byte(text in conflist()) {
        prop_assert!(Conflist::parse(text.as_bytes()).is_ok(), "{}", text);
        holds(text.as_bytes())?;
    }

    #[test]
    fn a_thousand_mutated_lists_lose_no_byte(
        text in conflist(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..4_u8), 1..6),
    ) {
        let mut bytes = text.into_bytes();
        for (place, byte, act) in changes {
            let at = place.index(bytes.len());
            let structural = [b'{', b'}', b'[', b']', b',', b'"', b'\\', b' '];
            match act {
                0 => bytes[at] = byte,
                1 => bytes[at] = structural[usize::from(byte) % structural.len()],
                2 => bytes.insert(at, byte),
                _ => drop(bytes.remove(at)),
            }
            if bytes.is_empty() { break; }
        }
        holds(&bytes)?;
    }

    #[test]
    fn a_thousand_single_configurations_stand_in_their_list_byte_for_byte(
        text in object_with(vec!["\"type\":\"bridge\"".to_owned(), "\"name\":\"n\"".to_owned()]),
    ) {
        let list = Conf::parse(text.as_bytes()).unwrap().to_list().unwrap();
        prop_assert_eq!(list.plugins().next().unwrap().text, text.as_bytes());
        holds(list.text())?;
    }
}
