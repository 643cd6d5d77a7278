use inpod_types::keys;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use proptest::{
    collection::{btree_map, vec},
    option,
    prelude::*,
    sample::select,
};
use serde_json::json;

use super::*;
use crate::testing::namespace;

/// A pod selector and a namespace selector.
type Both = (Option<LabelSelector>, Option<LabelSelector>);

fn labels(all: &[(&str, &str)]) -> Labels {
    let text = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
    all.iter().map(text).collect()
}

fn keys_and_values() -> impl Strategy<Value = (String, String)> {
    let pairs = select(vec![
        ("a", "x"),
        ("a", "y"),
        ("a", ""),
        ("b", "x"),
        ("b", "y"),
        (keys::NAMESPACE_NAME, "shop"),
        (keys::NAMESPACE_NAME, "bank"),
    ]);
    pairs.prop_map(|(key, value)| (key.to_owned(), value.to_owned()))
}

fn requirement() -> impl Strategy<Value = LabelSelectorRequirement> {
    let operator = select(vec!["In", "NotIn", "Exists", "DoesNotExist"]);
    (keys_and_values(), operator, option::of(keys_and_values())).prop_map(
        |((key, value), operator, other)| LabelSelectorRequirement {
            key,
            operator: operator.to_owned(),
            values: operator
                .ends_with("In")
                .then(|| [Some(value), other.map(|(_, value)| value)])
                .map(|values| values.into_iter().flatten().collect()),
        },
    )
}

fn selector() -> impl Strategy<Value = LabelSelector> {
    let equal = vec(keys_and_values(), 0..2);
    (equal, vec(requirement(), 0..4)).prop_map(|(equal, requirements)| LabelSelector {
        match_labels: Some(equal.into_iter().collect()),
        match_expressions: Some(requirements),
    })
}

fn some_labels() -> impl Strategy<Value = Labels> {
    let value = select(vec!["", "x", "y", "z"]).prop_map(str::to_owned);
    btree_map(select(vec!["a", "b"]).prop_map(str::to_owned), value, 0..3)
}

/// Evaluates a selector according to the documentation of Kubernetes.
fn selects(selector: Option<&LabelSelector>, labels: &Labels) -> bool {
    let Some(selector) = selector else {
        return true;
    };
    let mut equal = selector.match_labels.iter().flatten();
    let mut expressions = selector.match_expressions.iter().flatten();
    equal.all(|(key, value)| labels.get(key) == Some(value))
        && expressions.all(|expression| {
            let values = expression.values.clone().unwrap_or_default();
            let value = labels.get(&expression.key);
            match expression.operator.as_str() {
                "In" => value.is_some_and(|value| values.contains(value)),
                "NotIn" => !value.is_some_and(|value| values.contains(value)),
                "Exists" => value.is_some(),
                "DoesNotExist" => value.is_none(),
                other => panic!("{other}"),
            }
        })
}

fn parsed(entries: &[Both]) -> Selectors {
    let entry =
        |(pods, namespaces): &Both| json!({"podSelector": pods, "namespaceSelector": namespaces});
    let text = json!(entries.iter().map(entry).collect::<Vec<_>>()).to_string();
    text.parse().unwrap()
}

/// Returns all labels that `shop` could have, as far as the selectors distinguish the labels.
fn possible() -> Vec<Labels> {
    let values = [
        None,
        Some(""),
        Some("x"),
        Some("y"),
        Some("z"),
        Some("shop"),
        Some("bank"),
    ];
    let mut all = Vec::new();
    for a in values {
        for b in values {
            let given = [("a", a), ("b", b), (keys::NAMESPACE_NAME, Some("shop"))];
            let given = given
                .iter()
                .filter_map(|(key, value)| Some((*key, (*value)?)));
            all.push(labels(&given.collect::<Vec<_>>()));
        }
    }
    all
}

fn is_nothing(selector: Option<&LabelSelector>) -> bool {
    let nothing = |it: &LabelSelector| {
        let (equal, expressions) = (&it.match_labels, &it.match_expressions);
        equal.iter().flatten().next().is_none() && expressions.iter().flatten().next().is_none()
    };
    selector.is_none_or(nothing)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2000) })]

    #[test]
    fn a_known_namespace_is_decided_as_kubernetes_would(
        entries in vec((option::of(selector()), option::of(selector())), 0..4),
        pod in some_labels(),
        of_namespace in some_labels(),
    ) {
        let mut all = of_namespace.clone();
        all.insert(keys::NAMESPACE_NAME.to_owned(), "shop".to_owned());
        let mut namespace = namespace("shop");
        namespace.labels = of_namespace;
        let first = entries.iter().position(|(pods, namespaces)| {
            selects(pods.as_ref(), &pod) && selects(namespaces.as_ref(), &all)
        });
        let expected = match first {
            Some(at) => Selected::By {
                entry: at + 1,
                by_namespace: !is_nothing(entries[at].1.as_ref()),
            },
            None => Selected::Not {
                namespace_matches: entries.iter().any(|(_, it)| selects(it.as_ref(), &all)),
            },
        };
        let selectors = parsed(&entries);
        prop_assert_eq!(selectors.select(&pod, &namespace, true), expected);
        let named = entries.iter().any(|(_, it)| !is_nothing(it.as_ref()) && selects(it.as_ref(), &all));
        prop_assert_eq!(selectors.selects_namespace(&namespace), named);
    }

    #[test]
    fn an_unknown_namespace_decides_only_where_its_labels_matter(
        entries in vec((option::of(selector()), option::of(selector())), 0..4),
        pod in some_labels(),
    ) {
        let possible = possible();
        let for_pod = entries.iter().enumerate().filter(|(_, (pods, _))| selects(pods.as_ref(), &pod));
        let (mut surely, mut maybe) = (None, false);
        for (at, (_, namespaces)) in for_pod {
            let matching = possible.iter().filter(|it| selects(namespaces.as_ref(), it)).count();
            maybe |= matching > 0;
            if matching == possible.len() {
                surely = surely.or(Some(at + 1));
            }
        }
        let found = parsed(&entries).select(&pod, &namespace("shop"), false);
        match found {
            Selected::By { entry, .. } => prop_assert_eq!(Some(entry), surely),
            Selected::Unknown => prop_assert!(maybe && surely.is_none()),
            Selected::Not { .. } => prop_assert!(!maybe),
        }
    }
}

#[test]
fn yaml_json_and_what_go_takes_for_nothing_are_read() {
    let yaml = "- podSelector:\n    matchLabels: {mesh: \"on\"}\n- namespaceSelector:\n    matchExpressions:\n    - {key: team, operator: In, values: [a, b]}\n  podSelector: null\n";
    let json = r#"[{"podSelector":{"matchLabels":{"mesh":"on"}}},{"namespaceSelector":{"matchExpressions":[{"key":"team","operator":"In","values":["b","a"]}]}}]"#;
    let [yaml, json] = [yaml, json].map(|text| text.parse::<Selectors>().unwrap());
    assert_eq!(yaml, json);
    assert!("[]".parse::<Selectors>().unwrap().is_empty());
    let everything: Selectors = "[{}]".parse().unwrap();
    let all = everything.select(&Labels::new(), &namespace("shop"), false);
    assert_eq!(
        all,
        Selected::By {
            entry: 1,
            by_namespace: false
        }
    );
}

#[test]
fn selectors_errors_name_the_setting_the_entry_and_the_field() {
    let expression =
        |text: &str| format!("[{{}}, {{podSelector: {{matchExpressions: [{text}]}}}}]");
    for (text, words) in [
        (String::new(), vec!["not a list"]),
        ("{podSelector: {}}".to_owned(), vec!["not a list"]),
        ("[".to_owned(), vec!["neither YAML nor JSON"]),
        ("[{}, x]".to_owned(), vec!["entry 2:", "expected a map"]),
        ("[[~, ~]]".to_owned(), vec!["entry 1:", "expected a map"]),
        (
            "[{podSelectors: {}}]".to_owned(),
            vec!["entry 1:", "unknown", "`podSelectors`"],
        ),
        (
            "[{namespaceSelector: {matchLabel: {}}}]".to_owned(),
            vec!["entry 1: namespaceSelector:", "unknown", "`matchLabel`"],
        ),
        (
            "[{namespaceSelector: {matchLabels: {a: true}}}]".to_owned(),
            vec!["entry 1: namespaceSelector: a:", "true", "quote it"],
        ),
        (
            "[{podSelector: {matchLabels: {a b: c}}}]".to_owned(),
            vec!["entry 1: podSelector:", "\"a b\"", "label key"],
        ),
        (
            expression("{key: a, operator: in, values: [b]}"),
            vec!["entry 2: podSelector: a:", "operator \"in\"", "NotIn"],
        ),
        (
            expression("{key: a, operator: In}"),
            vec!["entry 2: podSelector: a:", "values", "at least one"],
        ),
        (
            expression("{key: a, operator: Exists, values: [b]}"),
            vec!["entry 2: podSelector: a:", "values", "none"],
        ),
        (
            expression("{operator: Exists}"),
            vec!["entry 2: podSelector:", "missing", "`key`"],
        ),
        (
            expression("{key: a, operator: In, values: [b, \"c d\"]}"),
            vec!["entry 2: podSelector: a:", "\"c d\""],
        ),
    ] {
        let error = text.parse::<Selectors>().unwrap_err().to_string();
        assert!(error.contains("setting enablement_selectors"), "{error}");
        assert!(
            words.iter().all(|word| error.contains(word)),
            "{text}: {error}"
        );
    }
}
