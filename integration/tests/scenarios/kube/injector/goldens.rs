//! Every injection golden passes the API server's validation.

use std::{fs, path::Path};

use integration::ApiServer;
use serde_json::{Value, json};

fn pods(object: &Value) -> Vec<Value> {
    if let Some(items) = object.get("items").and_then(Value::as_array) {
        return items.iter().flat_map(pods).collect();
    }
    let places = ["/spec/jobTemplate/spec/template", "/spec/template"];
    let found = places.iter().find_map(|place| object.pointer(place));
    let own = || (object["kind"] == "Pod").then_some(object);
    found.or_else(own).cloned().into_iter().collect()
}

#[test]
fn every_golden_passes_the_servers_own_validation() {
    let server = ApiServer::shared().unwrap();
    let namespace =
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "goldens"}});
    server.create("/api/v1/namespaces", &namespace).unwrap();
    let directory =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../services/lib/inpod-injection/tests/goldens");
    let mut count = 0;
    let mut refused = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if !path.to_str().unwrap().ends_with(".injected.yaml") {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let documents: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
        for mut pod in documents.iter().flat_map(pods) {
            pod["apiVersion"] = "v1".into();
            pod["kind"] = "Pod".into();
            pod["metadata"]["name"] = "golden".into();
            pod["metadata"]["namespace"] = "goldens".into();
            // The admission of service accounts, which would do this, is missing here.
            let account = &mut pod["spec"]["serviceAccountName"];
            if account.is_null() {
                *account = "default".into();
            }
            let asked = "/api/v1/namespaces/goldens/pods?dryRun=All&fieldValidation=Strict";
            if let Err(error) = server.create(asked, &pod) {
                refused.push(format!("{}: {error}", path.display()));
            }
            count += 1;
        }
    }
    assert!(refused.is_empty(), "{refused:#?}");
    assert!(count > 50, "{count}");
}
