//! Permissions of a node's repair token, whichever client uses it.

use anyhow::ensure;
use integration::eventually;
use serde_json::{Value, json};
use std::time::Duration;

use crate::kube::repair::fixture::{Action, Fixture};

/// Until a new server enforces a policy on a busy machine.
const IN_FORCE: Duration = Duration::from_secs(120);

const PATCH: (&str, &str) = ("PATCH", "application/merge-patch+json");
const STRATEGIC: (&str, &str) = ("PATCH", "application/strategic-merge-patch+json");
const DELETE: (&str, &str) = ("DELETE", "application/json");

struct Token {
    fixture: Fixture,
    token: String,
}

impl Token {
    fn new(action: Action) -> Self {
        let fixture = Fixture::new(action);
        let node = format!("{}-x", fixture.node.name());
        let token = fixture.server.token_of(fixture.account, &node).unwrap();
        fixture.make_on(&node, "web", &json!({"app": "web"}));
        fixture.make_on("another-node", "far", &json!({}));
        for name in ["web", "far"] {
            fixture.fail(name, 126);
        }
        Self { fixture, token }
    }

    fn ask(&self, how: (&str, &str), path: &str, object: &Value) -> anyhow::Result<Value> {
        self.fixture.server.ask_as(&self.token, how, path, object)
    }

    /// Repeats dry runs until the policy is enforced, then expects a refusal with this text.
    fn refuses(&self, how: (&str, &str), path: &str, object: &Value, words: &str) {
        let (dry_path, dry_object) = without_effect(how, path, object);
        eventually("the policy is in force", IN_FORCE, || {
            let refused = self.ask(how, &dry_path, &dry_object);
            let refused =
                refused.map_or_else(|error| format!("{error:#}"), |done| done.to_string());
            ensure!(refused.contains(words), "{path} {object}: {refused}");
            anyhow::Ok(())
        })
        .unwrap();
        let refused = format!("{:#}", self.ask(how, path, object).unwrap_err());
        assert!(refused.contains(words), "{path} {object}: {refused}");
    }
}

/// Returns a dry run: a deletion has it in its options, a patch in its query.
fn without_effect(how: (&str, &str), path: &str, object: &Value) -> (String, Value) {
    if how == DELETE {
        let options = json!({"kind": "DeleteOptions", "apiVersion": "v1", "dryRun": ["All"]});
        return (path.to_owned(), options);
    }
    (format!("{path}?dryRun=All"), object.clone())
}

fn label(value: Option<&str>) -> Value {
    json!({"metadata": {"labels": {"cni.istio.io/uninitialized": value}}})
}

#[test]
fn with_the_label_alone_on_nothing_is_changed_but_that_label_of_the_nodes_pods() {
    let token = Token::new(Action::Label);
    let (web, far) = (token.fixture.path("web"), token.fixture.path("far"));
    let status = |path: &str| format!("{path}/status");
    token.refuses(
        PATCH,
        &status(&far),
        &label(Some("true")),
        "its own node only",
    );
    for value in [Some("true"), None] {
        token.ask(PATCH, &status(&web), &label(value)).unwrap();
    }
    token.refuses(
        PATCH,
        &status(&web),
        &label(Some("no")),
        "sets its label to true",
    );
    let other = json!({"metadata": {"labels": {"app": "bank"}}});
    token.refuses(PATCH, &status(&web), &other, "no label but");
    for change in [
        json!({"metadata": {"annotations": {"sidecar.istio.io/status": "x"}}}),
        json!({"metadata": {"finalizers": ["example.com/stay"]}}),
        json!({"status": {"phase": "Failed"}}),
    ] {
        token.refuses(
            PATCH,
            &status(&web),
            &change,
            "nothing of a pod but a label",
        );
    }
    token.refuses(PATCH, &web, &label(Some("true")), "cannot patch resource");
    token.refuses(DELETE, &web, &json!({}), "cannot delete resource");
}

#[test]
fn with_deletion_alone_on_only_the_nodes_pods_that_failed_are_deleted() {
    let token = Token::new(Action::Delete);
    let (web, far) = (token.fixture.path("web"), token.fixture.path("far"));
    token.refuses(DELETE, &far, &json!({}), "its own node only");
    let node = format!("{}-x", token.fixture.node.name());
    token.fixture.make_on(&node, "fine", &json!({}));
    token.refuses(
        DELETE,
        &token.fixture.path("fine"),
        &json!({}),
        "whose init container has failed",
    );
    token.fixture.fail("fine", 1);
    token.refuses(
        DELETE,
        &token.fixture.path("fine"),
        &json!({}),
        "whose init container has failed",
    );
    token.refuses(
        PATCH,
        &format!("{web}/status"),
        &label(Some("true")),
        "cannot patch resource",
    );
    token.ask(DELETE, &web, &json!({})).unwrap();
}

#[test]
fn with_unknown_alone_on_only_true_becomes_unknown() {
    let token = Token::new(Action::Unknown);
    let [web, far] = ["web", "far"].map(|name| format!("{}/status", token.fixture.path(name)));
    let set = |kind: &str, status: &str| json!([{"type": kind, "status": status}]);
    let change = |all: &Value| json!({"status": {"conditions": all}});
    let as_others = |path: &str, all: &Value| {
        let server = &token.fixture.server;
        let done = server.ask_as("admin", STRATEGIC, path, &change(all));
        done.unwrap();
    };
    let ours = "inpod.io/InMesh";
    for path in [&web, &far] {
        as_others(path, &set(ours, "True"));
        as_others(path, &set("Ready", "False"));
    }
    let unknown = set(ours, "Unknown");
    token.refuses(STRATEGIC, &far, &change(&unknown), "its own node only");
    let (only, nothing) = ("only from True to Unknown", "nothing of a pod's status but");
    for (all, words) in [
        (set(ours, "False"), only),
        (json!([{"type": ours, "$patch": "delete"}]), only),
        (set("Ready", "True"), nothing),
        (set("Ready", "Unknown"), nothing),
        (set("example.com/Other", "Unknown"), nothing),
        (
            json!([unknown[0], {"type": "Ready", "$patch": "delete"}]),
            nothing,
        ),
    ] {
        token.refuses(STRATEGIC, &web, &change(&all), words);
    }
    let failed = json!({"status": {"phase": "Failed"}});
    token.refuses(PATCH, &web, &failed, nothing);
    token.refuses(PATCH, &web, &label(Some("true")), "changes no label");
    let change_unknown = change(&unknown);
    token.ask(STRATEGIC, &web, &change_unknown).unwrap();
    token.refuses(STRATEGIC, &web, &change(&set(ours, "True")), only);
    as_others(&web, &set(ours, "False"));
    token.refuses(STRATEGIC, &web, &change_unknown, only);
    as_others(&web, &json!([{"type": ours, "$patch": "delete"}]));
    token.refuses(STRATEGIC, &web, &change_unknown, only);
    let pod = token.fixture.path("web");
    token.refuses(DELETE, &pod, &json!({}), "cannot delete resource");
}

#[test]
fn without_either_on_nothing_is_changed() {
    let token = Token::new(Action::Repair);
    let web = token.fixture.path("web");
    token.refuses(
        PATCH,
        &format!("{web}/status"),
        &label(Some("true")),
        "cannot patch resource",
    );
    token.refuses(DELETE, &web, &json!({}), "cannot delete resource");
    for path in ["/api/v1/secrets", "/api/v1/namespaces", "/api/v1/nodes"] {
        let refused = token.ask(("GET", "application/json"), path, &json!({}));
        assert!(
            format!("{:#}", refused.unwrap_err()).contains("cannot list"),
            "{path}"
        );
    }
}
