//! Equivalents of Istio's injection goldens (services/docs/facts/istio-sidecar.md, 10.2); README.md lists the
//! gaps. `UPDATE_GOLDEN=1` rewrites them.

use std::{collections::BTreeSet, fs, path::PathBuf};

use inpod_injection::{Config, Injector, Outcome, Request, revert};
use serde_json::{Value, json};

/// JSON pointers to the pod template of an object.
const TEMPLATE_POINTERS: [&str; 2] = ["/spec/jobTemplate/spec/template", "/spec/template"];

fn directory() -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests", "goldens"]
        .iter()
        .collect()
}

fn inputs() -> BTreeSet<String> {
    let names = fs::read_dir(directory())
        .unwrap()
        .map(|it| it.unwrap().file_name().into_string().unwrap());
    let names = names.filter_map(|name| name.strip_suffix(".yaml").map(str::to_owned));
    names.filter(|name| !name.ends_with(".injected")).collect()
}

/// A comment on the first lines may set the configuration.
fn read(name: &str) -> (Injector, Vec<Value>) {
    let text = fs::read_to_string(directory().join(format!("{name}.yaml"))).unwrap();
    let config = text
        .lines()
        .find_map(|line| line.strip_prefix("# config: "))
        .unwrap_or_default();
    let injector = Injector::new(Config::parse(config).unwrap()).unwrap();
    (injector, serde_saphyr::from_multiple(&text).unwrap())
}

/// Injects into a Pod, into the pod template of a workload, or into each item of a List.
fn inject(injector: &Injector, object: &mut Value) {
    if let Some(items) = object.get_mut("items").and_then(Value::as_array_mut) {
        items.iter_mut().for_each(|item| inject(injector, item));
        return;
    }
    let object_before = object.clone();
    let mut pointers = TEMPLATE_POINTERS.into_iter();
    let template = pointers.find(|pointer| object.pointer(pointer).is_some());
    let pod = match template {
        Some(pointer) => object.pointer_mut(pointer).unwrap(),
        None if object["kind"] == "Pod" => object,
        None => return,
    };
    let before = pod.clone();
    if template.is_some() {
        pod["metadata"]["ownerReferences"] = json!([{
            "apiVersion": object_before["apiVersion"],
            "kind": object_before["kind"],
            "name": object_before["metadata"]["name"],
            "controller": true,
        }]);
    }
    let request = Request {
        pod,
        namespace: "default",
        environment: &[],
    };
    *pod = match injector.inject(&request).unwrap() {
        Outcome::Injected { mut pod, .. } if template.is_some() => {
            pod["metadata"]
                .as_object_mut()
                .unwrap()
                .remove("ownerReferences");
            pod
        }
        Outcome::Injected { pod, .. } => pod,
        Outcome::Skipped(_) => before,
    };
}

fn injected(injector: &Injector, documents: &[Value]) -> Vec<Value> {
    let mut documents = documents.to_vec();
    documents
        .iter_mut()
        .for_each(|document| inject(injector, document));
    documents
}

fn to_yaml(documents: &[Value]) -> String {
    let texts = documents.iter().map(serde_saphyr::to_string);
    texts.collect::<Result<Vec<_>, _>>().unwrap().join("---\n")
}

#[test]
#[expect(
    clippy::disallowed_methods,
    reason = "asks whether to rewrite the goldens"
)]
fn every_golden_is_as_it_was() {
    let update = std::env::var("UPDATE_GOLDEN").is_ok();
    for name in inputs() {
        let (injector, documents) = read(&name);
        let found = injected(&injector, &documents);
        let text = to_yaml(&found);
        let read_back: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
        assert_eq!(read_back, found, "{name}");
        let path = directory().join(format!("{name}.injected.yaml"));
        if update {
            fs::write(&path, &text).unwrap();
        }
        let wanted = fs::read_to_string(&path)
            .unwrap_or_else(|error| panic!("{name}: {error}; UPDATE_GOLDEN=1"));
        assert_eq!(text, wanted, "{name}");
    }
}

#[test]
fn no_golden_is_without_its_input() {
    let inputs = inputs();
    assert!(inputs.len() > 50, "{}", inputs.len());
    for entry in fs::read_dir(directory()).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let name = name.strip_suffix(".yaml").unwrap();
        assert!(
            inputs.contains(name.strip_suffix(".injected").unwrap_or(name)),
            "{name}"
        );
    }
}

#[test]
fn a_golden_that_is_injected_again_stays() {
    for name in inputs() {
        let (injector, documents) = read(&name);
        let once = injected(&injector, &documents);
        assert_eq!(injected(&injector, &once), once, "{name}");
    }
}

fn pods(value: &Value) -> Vec<Value> {
    if let Some(items) = value.get("items").and_then(Value::as_array) {
        return items.iter().flat_map(pods).collect();
    }
    let mut pointers = TEMPLATE_POINTERS.iter();
    let found = pointers.find_map(|pointer| value.pointer(pointer));
    vec![found.unwrap_or(value).clone()]
}

#[test]
fn what_a_golden_was_given_is_taken_away_again() {
    for name in inputs() {
        // Reverting keeps a custom template's other fields of the spec.
        if name == "custom-template" {
            continue;
        }
        let (injector, documents) = read(&name);
        for (before, after) in documents.iter().zip(injected(&injector, &documents)) {
            for (before, after) in pods(before).iter().zip(pods(&after)) {
                let mut stripped = revert::original_pod(&after);
                if before.get("metadata").is_none()
                    && let Some(fields) = stripped.as_object_mut()
                {
                    fields.remove("metadata");
                }
                assert_eq!(&stripped, before, "{name}");
            }
        }
    }
}
