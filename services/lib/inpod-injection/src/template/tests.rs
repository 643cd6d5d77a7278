use std::collections::BTreeSet;

use super::*;
use crate::{Injector, Request};
use serde_json::json;

fn refused(text: &str) -> (usize, String) {
    match Template::parse("mine", text).unwrap_err() {
        InvalidConfig::Template { line, why, .. } => (line, why),
        other @ (InvalidConfig::Yaml(_) | InvalidConfig::Field { .. }) => panic!("{other}"),
    }
}

/// Renders the annotations of a small pod with the given template.
fn rendered(text: &str) -> Value {
    let config = Config {
        templates: BTreeMap::from([("mine".to_owned(), text.to_owned())]),
        default_templates: vec!["mine".to_owned()],
        ..Config::default()
    };
    let injector = Injector::new(config).unwrap();
    let pod = json!({
        "metadata": {"name": "web", "annotations": {"note": "a } b\ncontainers: []"}},
        "spec": {"containers": [{"name": "app", "ports": [{"containerPort": 80}]}]},
    });
    let request = Request {
        pod: &pod,
        namespace: "shop",
        environment: &[],
    };
    match injector.inject(&request).unwrap() {
        crate::Outcome::Injected { pod, .. } => pod,
        crate::Outcome::Skipped(why) => panic!("{why:?}"),
    }
}

#[test]
fn a_go_template_is_refused_with_the_line_and_the_limit() {
    let (line, why) = refused("spec:\n  # {{ no }}\n  dnsPolicy: x\n  hostname: {{ .Name }}\n");
    assert_eq!(line, 4);
    assert!(
        why.contains("Go template") && why.contains("${NAME}"),
        "{why}"
    );
}

#[test]
fn what_there_is_not_is_named_with_its_line() {
    for (text, line, words) in [
        ("spec:\n  hostname: ${pod.nam}", 2, "\"pod.nam\""),
        ("spec:\n  hostname: ${annotation:}", 2, "annotation:"),
        ("spec:\n\n  hostname: a${pod.name", 3, "no closing }"),
        ("metadata:\n  name: x", 2, "labels or annotations"),
        ("kind: Pod", 1, "metadata or spec"),
        (
            "spec:\n  a: {$when: windows, b: 1}",
            2,
            "unknown condition \"windows\"",
        ),
        ("spec:\n  a: {$when: 3}", 2, "$when"),
        ("spec:\n  a: {$if: cni}", 2, "\"$if\""),
        ("spec:\n  a: {$value: 1, b: 2}", 2, "$when only"),
        ("spec:\n  a: {$patch: keep}", 2, "$patch"),
        ("- a", 1, "not a map"),
        ("spec: 3", 1, "not a map"),
        ("spec:\n  a: [", 2, "not valid YAML"),
    ] {
        let (found, why) = refused(text);
        assert!(why.contains(words), "{text}: {why}");
        assert!(
            found == line || words == "not valid YAML",
            "{text}: line {found}"
        );
    }
}

#[test]
fn a_variable_keeps_its_type_where_it_stands_alone() {
    let pod = rendered(
        "spec:\n  a: ${proxy.statusPort}\n  b: x${proxy.statusPort}\n  c: ${proxy.resources}\n  d: $${pod.name}\n",
    );
    assert_eq!(pod["spec"]["a"], 15020);
    assert_eq!(pod["spec"]["b"], "x15020");
    assert_eq!(pod["spec"]["c"]["requests"]["cpu"], "100m");
    assert_eq!(pod["spec"]["d"], "${pod.name}");
    let pod = rendered(
        "spec: {containers: [{name: x, args: ['${proxy.uid}'], env: [{name: A, value: '${proxy.statusPort}'}]}]}",
    );
    let added = &pod["spec"]["containers"][1];
    assert_eq!(
        (&added["args"][0], &added["env"][0]["value"]),
        (&json!("1337"), &json!("15020"))
    );
}

#[test]
fn what_is_nothing_is_left_out_with_what_it_stands_in_unless_a_default_stands_there() {
    let pod = rendered(
        "spec:\n  a: ${mesh.network}\n  b: [x, 'y${mesh.network}']\n  c: ${label:x|1}\n  d: {e: '${mesh.network}'}\n  f: ${label:x|}\n  g: {}\n",
    );
    let spec = &pod["spec"];
    assert_eq!(
        (&spec["a"], &spec["b"], &spec["c"]),
        (&Value::Null, &json!(["x"]), &json!("1"))
    );
    assert_eq!(
        (&spec["d"], &spec["f"], &spec["g"]),
        (&Value::Null, &json!(""), &json!({}))
    );
}

#[test]
fn conditions_let_in_and_leave_out() {
    let text = "spec:\n  a: {$when: cni, x: 1}\n  b: {$when: '!cni', x: 1}\n  c: [{$when: [cni, '!native'], $value: w}, z]\n";
    let spec = &rendered(text)["spec"];
    assert_eq!(
        (&spec["a"], &spec["b"], &spec["c"]),
        (&json!({"x": 1}), &Value::Null, &json!(["w", "z"]))
    );
}

#[test]
fn nothing_in_a_pod_becomes_structure() {
    let pod = rendered("spec:\n  hostname: '${annotation:note}'\n");
    assert_eq!(pod["spec"]["hostname"], "a } b\ncontainers: []");
    assert_eq!(pod["spec"]["containers"].as_array().unwrap().len(), 1);
}

#[test]
fn a_list_within_a_text_is_rejected() {
    let config = Config {
        templates: BTreeMap::from([(
            "mine".to_owned(),
            "spec: {a: 'x${proxy.resources}'}".to_owned(),
        )]),
        default_templates: vec!["mine".to_owned()],
        ..Config::default()
    };
    let pod = json!({"spec": {"containers": [{"name": "a"}]}});
    let request = Request {
        pod: &pod,
        namespace: "",
        environment: &[],
    };
    let message = Injector::new(config)
        .unwrap()
        .inject(&request)
        .unwrap_err()
        .to_string();
    assert!(
        message.contains("\"mine\"") && message.contains("proxy.resources"),
        "{message}"
    );
}

#[test]
fn templates_and_aliases_that_are_named_have_to_be_there() {
    for text in ["defaultTemplates: [gateway]", "aliases: {x: [gateway]}"] {
        let message = Injector::new(Config::parse(text).unwrap())
            .unwrap_err()
            .to_string();
        assert!(message.contains("gateway"), "{message}");
    }
    let fine = "aliases: {usual: [sidecar]}\ndefaultTemplates: [usual]";
    assert!(Injector::new(Config::parse(fine).unwrap()).is_ok());
}

#[test]
fn every_label_and_annotation_of_the_built_in_template_is_in_the_table() {
    let page = include_str!("../../../../../deploy/docs/labels.md");
    let is_other = |c: char| !(c.is_ascii_alphanumeric() || "./-".contains(c));
    let keys = SIDECAR
        .lines()
        .filter(|line| !line.trim_start().starts_with('#'));
    let keys = keys
        .flat_map(|line| line.split(is_other))
        .filter(|word| word.contains("istio.io/"));
    let mut count = 0;
    for key in keys {
        assert!(page.contains(&format!("\n| `{key}` |")), "{key}");
        count += 1;
    }
    assert!(count > 10, "{count}");
}

#[test]
fn the_page_lists_every_variable_and_every_condition() {
    let page = include_str!("../../README.md");
    let rows = |head: &str| {
        let (_, table) = page.split_once(head).unwrap();
        let rows = table.lines().skip(2).take_while(|line| !line.is_empty());
        let names = rows.map(|row| row.split('`').nth(1).unwrap());
        names.collect::<BTreeSet<_>>()
    };
    assert_eq!(rows("| Variable | Value |"), *variables::NAMES);
    let conditions = CONDITIONS.iter().map(|(name, _)| *name).collect();
    assert_eq!(rows("| Condition | Holds if |"), conditions);
}
