//! For random pods: a second injection changes nothing, reverting works, and the patch leads to the promised pod.

use std::sync::LazyLock;

use inpod_injection::{Config, Injector, Outcome, Request, revert};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

fn name() -> impl Strategy<Value = String> {
    "[a-z]([a-z0-9-]{0,8}[a-z0-9])?"
}

fn port() -> impl Strategy<Value = Value> {
    prop_oneof![
        (1_u16..65_535).prop_map(Value::from),
        prop_oneof![Just("web"), Just("admin"), Just("nobody")].prop_map(Value::from),
    ]
}

fn handler() -> impl Strategy<Value = Value> {
    prop_oneof![
        (port(), any::<bool>()).prop_map(|(port, tls)| {
            let scheme = if tls { "HTTPS" } else { "HTTP" };
            json!({"httpGet": {"path": "/ok", "port": port, "scheme": scheme, "host": "h"}, "timeoutSeconds": 3})
        }),
        port().prop_map(|port| json!({"tcpSocket": {"port": port}, "periodSeconds": 5})),
        (1_u16..65_535).prop_map(|port| json!({"grpc": {"port": port}})),
        Just(json!({"exec": {"command": ["true"]}})),
    ]
}

fn hook() -> impl Strategy<Value = Value> {
    prop_oneof![
        port().prop_map(|port| json!({"httpGet": {"path": "/bye", "port": port}})),
        Just(json!({"sleep": {"seconds": 1}})),
    ]
}

fn container() -> impl Strategy<Value = Value> {
    let probe = || proptest::option::of(handler());
    (name(), probe(), probe(), probe(), proptest::option::of(hook()), any::<bool>(), any::<bool>()).prop_map(
        |(name, ready, live, start, stop, has_ports, has_env)| {
            let mut container = json!({"name": format!("c-{name}"), "image": "i"});
            let fields = container.as_object_mut().unwrap();
            for (key, probe) in [("readinessProbe", ready), ("livenessProbe", live), ("startupProbe", start)] {
                fields.extend(probe.map(|probe| (key.to_owned(), probe)));
            }
            fields.extend(stop.map(|stop| ("lifecycle".to_owned(), json!({"preStop": stop}))));
            if has_ports {
                let ports = json!([{"name": "web", "containerPort": 8080}, {"name": "admin", "containerPort": 9090, "protocol": "TCP"}]);
                fields.insert("ports".to_owned(), ports);
            }
            if has_env {
                fields.insert("env".to_owned(), json!([{"name": "A", "value": "1"}]));
            }
            container
        },
    )
}

/// A sidecar of the pod's author, with its list.
fn declared() -> impl Strategy<Value = Option<Value>> {
    proptest::option::of(prop_oneof![
        Just(json!({"name": "istio-proxy", "image": "auto"})),
        Just(
            json!({"name": "istio-proxy", "image": "mine:1", "args": ["proxy", "sidecar"], "securityContext": {"runAsUser": 2000}})
        ),
        Just(
            json!({"name": "istio-proxy", "image": "auto", "readinessProbe": {"exec": {"command": ["x"]}}, "env": [{"name": "POD_NAME", "value": "x"}]})
        ),
    ])
}

fn notes(
    known: &'static [(&'static str, &'static str)],
) -> impl Strategy<Value = Map<String, Value>> {
    proptest::sample::subsequence(known, 0..=known.len()).prop_map(|chosen| {
        let all = chosen
            .into_iter()
            .map(|(key, value)| (key.to_owned(), Value::from(value)));
        all.collect()
    })
}

const ANNOTATIONS: &[(&str, &str)] = &[
    ("note", "mine"),
    ("traffic.sidecar.istio.io/excludeInboundPorts", "3306"),
    ("traffic.sidecar.istio.io/includeInboundPorts", ""),
    (
        "traffic.sidecar.istio.io/includeOutboundIPRanges",
        "10.0.0.0/8",
    ),
    ("sidecar.istio.io/interceptionMode", "TPROXY"),
    ("sidecar.istio.io/nativeSidecar", "true"),
    ("status.sidecar.istio.io/port", "16020"),
    ("kubectl.kubernetes.io/default-container", "c-x"),
    (
        "proxy.istio.io/config",
        "{holdApplicationUntilProxyStarts: true, proxyMetadata: {Z: '1', ISTIO_META_ENABLE_HBONE: 'true'}}",
    ),
    ("sidecar.istio.io/proxyCPU", "10m"),
    ("istio.io/rev", "other"),
];

const LABELS: &[(&str, &str)] = &[
    ("app", "web"),
    ("version", "v1"),
    ("security.istio.io/tlsMode", "disabled"),
    ("service.istio.io/canonical-name", "own"),
    ("topology.istio.io/network", "far"),
];

fn apart(mut containers: Vec<Value>) -> Vec<Value> {
    containers.sort_by_key(|it| it["name"].to_string());
    containers.dedup_by_key(|it| it["name"].to_string());
    containers
}

prop_compose! {
    fn pod()(
        containers in proptest::collection::vec(container(), 1..4),
        init in proptest::collection::vec(container(), 0..3),
        declared in declared(),
        annotations in notes(ANNOTATIONS),
        labels in notes(LABELS),
        has_volume in any::<bool>(),
        has_secret in any::<bool>(),
    ) -> Value {
        let mut containers = apart(containers);
        containers.extend(declared);
        let mut pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"}, "spec": {"containers": containers}});
        if !annotations.is_empty() {
            pod["metadata"]["annotations"] = annotations.into();
        }
        if !labels.is_empty() {
            pod["metadata"]["labels"] = labels.into();
        }
        if !init.is_empty() {
            let mut init = apart(init);
            // Names are unique per pod.
            for it in &mut init {
                it["name"] = format!("init-{}", it["name"].as_str().unwrap()).into();
            }
            pod["spec"]["initContainers"] = init.into();
        }
        if has_volume {
            pod["spec"]["volumes"] = json!([{"name": "data", "emptyDir": {}}, {"name": "istio-data", "hostPath": {"path": "/d"}}]);
        }
        if has_secret {
            pod["spec"]["imagePullSecrets"] = json!([{"name": "mine"}]);
        }
        pod
    }
}

const CONFIGS: [&str; 4] = [
    "",
    "cni: false\nrewriteAppHTTPProbe: false",
    "nativeSidecars: true\nnetwork: near\nimagePullSecrets: [mine, ours]",
    "proxyConfig: {holdApplicationUntilProxyStarts: true}\ninjectedAnnotations: {x: z}",
];

/// Parses each configuration once.
fn injector(config: &str) -> &'static Injector {
    static ALL: LazyLock<Vec<Injector>> = LazyLock::new(|| {
        let made = CONFIGS
            .iter()
            .map(|text| Injector::new(Config::parse(text).unwrap()).unwrap());
        made.collect()
    });
    let at = CONFIGS.iter().position(|text| *text == config).unwrap();
    &ALL[at]
}

fn environment() -> impl Strategy<Value = Vec<(String, String)>> {
    let pair = ("ISTIO_META_CLUSTER_ID".to_owned(), "far".to_owned());
    prop_oneof![
        Just(vec![]),
        Just(vec![pair, ("X".to_owned(), "1".to_owned())])
    ]
}

fn inject(
    injector: &Injector,
    pod: &Value,
    environment: &[(String, String)],
) -> (Value, json_patch::Patch) {
    let request = Request {
        pod,
        namespace: "shop",
        environment,
    };
    match injector.inject(&request).unwrap() {
        Outcome::Injected { pod, patch } => (pod, patch),
        Outcome::Skipped(why) => panic!("{why:?}"),
    }
}

/// Reverting moves a declared proxy to the end.
fn without_order(mut pod: Value) -> Value {
    let containers = pod["spec"]["containers"].as_array_mut().unwrap();
    containers.sort_by_key(|it| it["name"].to_string());
    pod
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn injecting_twice_is_injecting_once(pod in pod(), config in proptest::sample::select(&CONFIGS[..]), environment in environment()) {
        let injector = injector(config);
        let (once, _) = inject(injector, &pod, &environment);
        let (twice, patch) = inject(injector, &once, &environment);
        prop_assert_eq!(&once, &twice);
        prop_assert!(patch.0.is_empty());
    }

    #[test]
    fn what_was_injected_is_taken_away_again(pod in pod(), config in proptest::sample::select(&CONFIGS[..]), environment in environment()) {
        let injector = injector(config);
        let (injected, _) = inject(injector, &pod, &environment);
        prop_assert_ne!(&injected, &pod);
        prop_assert_eq!(without_order(revert::original_pod(&injected)), without_order(pod));
    }

    #[test]
    fn the_patch_leads_to_what_is_promised(pod in pod(), config in proptest::sample::select(&CONFIGS[..])) {
        let injector = injector(config);
        let (injected, patch) = inject(injector, &pod, &[]);
        let mut patched = pod;
        json_patch::patch(&mut patched, &patch.0).unwrap();
        prop_assert_eq!(patched, injected);
    }

    #[test]
    fn names_are_apart_and_the_pods_own_containers_keep_their_order(pod in pod(), config in proptest::sample::select(&CONFIGS[..])) {
        let injector = injector(config);
        let (injected, _) = inject(injector, &pod, &[]);
        let names = |pod: &Value, list: &str| -> Vec<String> {
            let items = pod["spec"][list].as_array().cloned().unwrap_or_default();
            items.iter().map(|it| it["name"].as_str().unwrap().to_owned()).collect()
        };
        let mut all = names(&injected, "initContainers");
        all.extend(names(&injected, "containers"));
        let count = all.len();
        all.sort();
        all.dedup();
        prop_assert_eq!(all.len(), count);
        for list in ["initContainers", "containers"] {
            let own = |names: Vec<String>| -> Vec<String> { names.into_iter().filter(|it| !it.starts_with("istio-")).collect() };
            prop_assert_eq!(own(names(&pod, list)), own(names(&injected, list)));
        }
    }

    #[test]
    fn any_tree_is_answered(pod in json(), name in "\\PC{0,20}") {
        let injector = injector("");
        let request = Request { pod: &pod, namespace: &name, environment: &[] };
        drop(injector.inject(&request));
        drop(revert::original_pod(&pod));
    }

    #[test]
    fn any_text_is_no_template_or_one_that_comes_to_something(text in "(\\$\\{|\\}|\\||spec|: |\n  |- |\\{|[a-z.$]|\\PC){0,40}") {
        let config = Config {
            templates: [("sidecar".to_owned(), text)].into(),
            ..Config::default()
        };
        if let Ok(injector) = Injector::new(config) {
            let pod = json!({"spec": {"containers": [{"name": "a"}]}});
            let request = Request { pod: &pod, namespace: "", environment: &[] };
            drop(injector.inject(&request));
        }
    }
}

/// Random JSON, with pod fields among others.
fn json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        prop_oneof![
            Just("istio-proxy"),
            Just("true"),
            Just("{}"),
            Just("{\"containers\":null,\"labels\":{\"a\":null}}")
        ]
        .prop_map(Value::from),
    ];
    let keys = proptest::sample::select(
        &[
            "metadata",
            "spec",
            "labels",
            "annotations",
            "containers",
            "initContainers",
            "volumes",
            "name",
            "env",
            "ports",
            "httpGet",
            "port",
            "readinessProbe",
            "lifecycle",
            "preStop",
            "securityContext",
            "runAsUser",
            "args",
            "sidecar.istio.io/status",
            "proxy.istio.io/overrides",
            "sidecar.istio.io/inject",
            "imagePullSecrets",
        ][..],
    );
    leaf.prop_recursive(6, 64, 6, move |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            proptest::collection::btree_map(keys.clone().prop_map(str::to_owned), inner, 0..6)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}
