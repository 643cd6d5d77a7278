use json_patch::patch;
use serde_json::json;

use super::*;

fn operations(before: &Value, after: &Value) -> Vec<String> {
    let Patch(made) = create(before, after);
    let mut tried = before.clone();
    patch(&mut tried, &made).unwrap();
    assert_eq!(&tried, after);
    let text = |it: &PatchOperation| {
        let it = serde_json::to_value(it).unwrap();
        format!(
            "{} {}",
            it["op"].as_str().unwrap(),
            it["path"].as_str().unwrap()
        )
    };
    made.iter().map(text).collect()
}

#[test]
fn what_is_equal_needs_no_operation() {
    let pod = json!({"a": [1, {"b": null}]});
    assert!(operations(&pod, &pod).is_empty());
}

#[test]
fn an_item_that_comes_before_others_touches_none_of_them() {
    let before = json!({"initContainers": [{"name": "a"}, {"name": "b", "image": "1"}]});
    let after = json!({"initContainers": [{"name": "x"}, {"name": "a"}, {"name": "b", "image": "2"}, {"name": "z"}]});
    let expected = [
        "add /initContainers/0",
        "replace /initContainers/2/image",
        "add /initContainers/3",
    ];
    assert_eq!(operations(&before, &after), expected);
}

#[test]
fn items_go_from_behind_and_maps_lose_before_they_gain() {
    let before = json!({"env": [{"name": "a"}, {"name": "b"}, {"name": "c"}], "x": 1});
    let after = json!({"env": [{"name": "b"}], "y": 1});
    let expected = ["remove /x", "remove /env/2", "remove /env/0", "add /y"];
    assert_eq!(operations(&before, &after), expected);
}

#[test]
fn a_list_without_keys_of_its_own_is_replaced_whole() {
    let before = json!({"args": ["1", "2"]});
    assert_eq!(
        operations(&before, &json!({"args": ["2"]})),
        ["replace /args"]
    );
    let twice = json!({"env": [{"name": "a"}, {"name": "a"}]});
    let once = json!({"env": [{"name": "a"}]});
    assert_eq!(operations(&twice, &once), ["replace /env"]);
}

fn named(names: &str) -> Value {
    let items = names.chars().map(|name| json!({"name": name.to_string()}));
    json!({"containers": items.collect::<Vec<_>>()})
}

#[test]
fn an_item_that_is_to_stand_elsewhere_is_moved_and_no_other() {
    let rows: [(&str, &str, &[&str]); 6] = [
        ("apx", "axp", &["move /containers/2"]),
        ("pabc", "abcp", &["move /containers/3"]),
        ("abcp", "pabc", &["move /containers/0"]),
        (
            "pabd",
            "abcpd",
            &["move /containers/2", "add /containers/2"],
        ),
        (
            "xpab",
            "abp",
            &["remove /containers/0", "move /containers/2"],
        ),
        (
            "abcd",
            "dcba",
            &[
                "move /containers/0",
                "move /containers/1",
                "move /containers/3",
            ],
        ),
    ];
    for (before, after, expected) in rows {
        assert_eq!(
            operations(&named(before), &named(after)),
            expected,
            "{before} {after}"
        );
    }
}

#[test]
fn every_order_is_reached_from_every_other() {
    let orders = ["", "a", "ab", "ba", "abc", "cab", "bca", "xaybz", "dcba"];
    for before in orders {
        for after in orders {
            let count = operations(&named(before), &named(after)).len();
            assert!(count <= before.len() + after.len(), "{before} {after}");
        }
    }
}

#[test]
fn names_with_marks_of_a_pointer_are_escaped() {
    let after = json!({"annotations": {"a.b/c~d": "1"}});
    let before = json!({"annotations": {}});
    assert_eq!(operations(&before, &after), ["add /annotations/a.b~1c~0d"]);
}
