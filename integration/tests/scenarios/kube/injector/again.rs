//! The API server calls the injector again because a later webhook changed the pod (`reinvocationPolicy: IfNeeded`):
//! it makes the changes that became necessary and reverts nothing.

use serde_json::{Value, json};

use crate::kube::injector::{
    ENABLED, containers,
    other::{Change, Other},
    webhook::{Webhook, pod},
};

fn with_reinvocation(webhook: &Webhook, name: &str, path: &str) -> Value {
    let mut hook = webhook.hook(name, path, "Fail");
    hook["reinvocationPolicy"] = "IfNeeded".into();
    hook
}

/// Another webhook changes the pod after the injector; returns the injector's outcomes.
fn made(name: &'static str, change: Change) -> (Value, Vec<(String, u64)>) {
    let webhook = Webhook::start(name);
    let inside = webhook.namespace("in", Some(ENABLED));
    let other = Other::start(&webhook, change);
    let hooks = json!([
        with_reinvocation(&webhook, "first", "/inject"),
        other.hook(&webhook)
    ]);
    webhook.register(&hooks);
    webhook.until(&inside, |_| other.asked() > 0);
    let (asked, before) = (other.asked(), webhook.reviews().len());
    let made = webhook.make(&inside, &pod("web")).unwrap();
    assert_eq!(other.asked(), asked + 1);
    (made, webhook.reviews().split_off(before))
}

fn mirrored(pod: &Value) -> Value {
    let of = |list: &str| {
        let all = pod["spec"][list].as_array().unwrap().iter().enumerate();
        let operation = |(at, it): (usize, &Value)| {
            let image = format!("mirror/{}", it["image"].as_str().unwrap());
            json!({"op": "replace", "path": format!("/spec/{list}/{at}/image"), "value": image})
        };
        all.map(operation).collect::<Vec<_>>()
    };
    [of("initContainers"), of("containers")].concat().into()
}

#[test]
fn images_that_a_later_webhook_has_changed_stay_and_the_second_patch_is_empty() {
    let (made, reviews) = made("mirrored", mirrored);
    let [(first, some), (second, none)] = reviews.as_slice() else {
        panic!("{reviews:?}");
    };
    assert_eq!((first.as_str(), second.as_str()), ("injected", "unchanged"));
    assert!(*some > 0 && *none == 0, "{reviews:?}");
    assert_eq!(containers(&made), ["app", "istio-proxy"]);
    for list in ["initContainers", "containers"] {
        for container in made["spec"][list].as_array().unwrap() {
            let image = container["image"].as_str().unwrap();
            assert!(image.starts_with("mirror/"), "{container}");
        }
    }
}

fn sized(_: &Value) -> Value {
    let sizes = json!({"requests": {"cpu": "7m"}, "limits": {"cpu": "70m"}});
    json!([
        {"op": "replace", "path": "/spec/containers/0/resources", "value": sizes},
        {"op": "replace", "path": "/spec/containers/1/resources", "value": sizes},
        {"op": "add", "path": "/metadata/annotations/traffic.sidecar.istio.io~1excludeInboundPorts", "value": "3306"},
    ])
}

#[test]
fn sizes_that_a_later_webhook_gives_stay_and_so_does_its_word_on_ports() {
    let (made, reviews) = made("sized", sized);
    let outcomes: Vec<_> = reviews
        .iter()
        .map(|(outcome, _)| outcome.as_str())
        .collect();
    // Only the status is new: another owner has the port.
    assert_eq!(outcomes, ["injected", "injected"], "{reviews:?}");
    assert_eq!(reviews[1].1, 1, "{reviews:?}");
    for container in made["spec"]["containers"].as_array().unwrap() {
        assert_eq!(container["resources"]["limits"]["cpu"], "70m");
    }
    let annotations = &made["metadata"]["annotations"];
    assert_eq!(
        annotations["traffic.sidecar.istio.io/excludeInboundPorts"],
        "3306"
    );
}

fn grown(_: &Value) -> Value {
    let extra = json!({"name": "extra", "image": "extra", "ports": [{"containerPort": 8080}], "readinessProbe": {"httpGet": {"path": "/ok", "port": 8080}}});
    json!([{"op": "add", "path": "/spec/containers/-", "value": extra}])
}

#[test]
fn of_a_container_that_a_later_webhook_adds_the_proxy_hears_and_no_more_is_changed() {
    let (made, reviews) = made("grown", grown);
    let outcomes: Vec<_> = reviews
        .iter()
        .map(|(outcome, _)| outcome.as_str())
        .collect();
    assert_eq!(outcomes, ["injected", "injected"], "{reviews:?}");
    // The containers and the status.
    assert_eq!(reviews[1].1, 2, "{reviews:?}");
    assert_eq!(containers(&made), ["app", "extra", "istio-proxy"]);
    let proxy = &made["spec"]["containers"][2];
    let said = |name: &str| {
        let mut all = proxy["env"].as_array().unwrap().iter();
        let found = all.find(|it| it["name"] == name).unwrap();
        found["value"].as_str().unwrap().to_owned()
    };
    assert_eq!(said("ISTIO_META_APP_CONTAINERS"), "app,extra");
    let probers: Value = serde_json::from_str(&said("ISTIO_KUBE_APP_PROBERS")).unwrap();
    let (own, theirs) = ("/app-health/app/readyz", "/app-health/extra/readyz");
    assert_eq!(probers[own]["httpGet"]["port"], 80);
    assert_eq!(probers[theirs]["httpGet"]["path"], "/ok");
    let asked = &made["spec"]["containers"][1]["readinessProbe"]["httpGet"];
    assert_eq!(
        (&asked["path"], &asked["port"]),
        (&json!(theirs), &json!(15020))
    );
}

#[test]
fn two_webhooks_that_may_be_asked_again_make_one_proxy_and_each_variable_once() {
    let webhook = Webhook::start("again");
    let inside = webhook.namespace("in", Some(ENABLED));
    // The second webhook changes the proxy's environment.
    let hooks = json!([
        with_reinvocation(&webhook, "first", "/inject"),
        with_reinvocation(&webhook, "second", "/inject/later/1")
    ]);
    webhook.register(&hooks);
    webhook.until_injected(&inside);
    let before = webhook.reviews().len();
    let made = webhook.make(&inside, &pod("web")).unwrap();
    assert_eq!(containers(&made), ["app", "istio-proxy"]);
    let env = made["spec"]["containers"][1]["env"].as_array().unwrap();
    let later = env.iter().filter(|it| it["name"] == "LATER").count();
    assert_eq!(later, 1, "{env:?}");
    let reviews = webhook.reviews().split_off(before);
    // The first one finds its change there, so the second is not called again.
    let [_, (_, variable), last] = reviews.as_slice() else {
        panic!("{reviews:?}");
    };
    assert_eq!((*variable, last), (1, &("unchanged".to_owned(), 0)));
}
