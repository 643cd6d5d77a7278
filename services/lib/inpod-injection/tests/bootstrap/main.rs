//! Tests the bootstrap of `standalone` against a schema of Envoy's API (`model`), or a real Envoy:
//! `ENVOY=/path/to/envoy cargo test -p inpod-injection --test bootstrap -- --ignored`.
// cfg(test) marks all of this as test code for clippy.
#![cfg(test)]

mod model;
mod mutations;

use std::net::IpAddr;

use inpod_injection::{Config, Injector, Outcome, Request};
use model::{Bootstrap, Way};
use mutations::{mutations, positions};
use serde_json::{Value, json};

const KEY: &str = "inpod.io/default-endpoints";

/// One endpoint of each form.
const ENDPOINTS: &str =
    "8080=127.0.0.1:80,8081=[::1]:81,8082=0.0.0.0:82,8083=[::]:83,8084=unix:///run/app.sock";

const POD: &str = "10.0.0.9";

fn injected(config: &str, annotations: &Value) -> Result<Value, String> {
    let mut config = Config::parse(config).unwrap();
    if config.default_templates == ["sidecar"] && config.templates.is_empty() {
        config.default_templates = vec!["standalone".to_owned()];
    }
    let injector = Injector::new(config).unwrap();
    let probe = json!({"httpGet": {"path": "/", "port": 8080}});
    let app = json!({"name": "app", "image": "i", "readinessProbe": probe});
    let pod = json!({"metadata": {"annotations": annotations}, "spec": {"containers": [app]}});
    let request = Request {
        pod: &pod,
        namespace: "shop",
        owner: None,
        environment: &[],
    };
    match injector
        .inject(&request)
        .map_err(|error| error.to_string())?
    {
        Outcome::Injected { pod, .. } => Ok(pod),
        Outcome::Skipped(why) => panic!("{why:?}"),
    }
}

fn proxy(pod: &Value) -> &Value {
    let mut containers = pod["spec"]["containers"].as_array().unwrap().iter();
    containers.find(|it| it["name"] == "istio-proxy").unwrap()
}

/// Returns what the kubelet passes to the pod's proxy.
fn text(config: &str, annotations: &Value) -> String {
    let pod = injected(config, annotations).unwrap();
    let args = proxy(&pod)["args"].as_array().unwrap().clone();
    let position = args.iter().position(|arg| arg == "--config-yaml").unwrap();
    let text = args[position + 1].as_str().unwrap();
    let given = text.replace("$(INSTANCE_IP)", POD);
    assert!(!given.contains('$'), "{given}");
    given
}

fn document(config: &str, annotations: &Value) -> Value {
    serde_json::from_str(&text(config, annotations)).unwrap()
}

/// Parses as strictly as Envoy.
fn read(document: &Value) -> Result<Bootstrap, String> {
    let read: Bootstrap =
        serde_json::from_value(document.clone()).map_err(|error| error.to_string())?;
    let faults = read.faults();
    faults
        .is_empty()
        .then_some(read)
        .ok_or_else(|| faults.join("; "))
}

fn drains(duration: &str) -> Value {
    json!({"proxy.istio.io/config": format!("terminationDrainDuration: {duration}")})
}

fn variants() -> Vec<(&'static str, Value)> {
    let tproxy = json!({"sidecar.istio.io/interceptionMode": "TPROXY"});
    let each = ENDPOINTS
        .split(',')
        .map(|endpoint| json!({(KEY): endpoint}));
    let all = each.chain([
        json!({}),
        json!({(KEY): ""}),
        json!({(KEY): ENDPOINTS}),
        tproxy,
        drains("0s"),
        drains("3600s"),
    ]);
    all.flat_map(|annotations| {
        ["", "proxy: {ipv6: false}"].map(|config| (config, annotations.clone()))
    })
    .collect()
}

#[test]
fn every_variant_is_what_envoy_takes() {
    let variants = variants();
    assert_eq!(variants.len(), 22);
    for (config, annotations) in variants {
        let document = document(config, &annotations);
        read(&document).unwrap_or_else(|why| panic!("{config} {annotations}: {why}\n{document}"));
    }
}

#[test]
fn a_field_of_another_name_or_type_is_found_wherever_it_stands() {
    let tproxy = json!({"sidecar.istio.io/interceptionMode": "TPROXY"});
    let mut count = 0;
    for annotations in [json!({(KEY): ENDPOINTS}), tproxy] {
        let document = document("", &annotations);
        for position in positions(&document, "") {
            for (what, mutated) in mutations(&document, &position) {
                assert!(read(&mutated).is_err(), "{what}");
                count += 1;
            }
        }
    }
    assert!(count > 1000, "{count}");
}

/// Not required by Envoy's API, by last name.
const OPTIONAL: [&str; 22] = [
    "additional_addresses",
    "circuit_breakers",
    "default_filter_chain",
    "delay",
    "destination_port",
    "envoy.filters.http.fault",
    "extra_source_addresses",
    "filter_chain_match",
    "idle_timeout",
    "listener_filters",
    "load_assignment",
    "max_connections",
    "max_pending_requests",
    "max_requests",
    "numerator",
    "percentage",
    "prefix_ranges",
    "stream_idle_timeout",
    "traffic_direction",
    "transparent",
    "typed_per_filter_config",
    "upstream_bind_config",
];

#[test]
fn a_required_field_that_is_missing_is_found() {
    let document = document("", &json!({(KEY): ENDPOINTS}));
    let mut count = 0;
    for position in positions(&document, "").into_iter().skip(1) {
        let (parent, key) = position.rsplit_once('/').unwrap();
        // Envoy also permits unnamed chains and routes, no rewrite, and a range without length.
        let is_name =
            key == "name" && (parent.contains("chain") || parent.ends_with("route_config"));
        let is_optional =
            OPTIONAL.contains(&key) || is_name || matches!(key, "prefix_rewrite" | "prefix_len");
        let mut mutated = document.clone();
        let fields = mutated.pointer_mut(parent).and_then(Value::as_object_mut);
        let Some(fields) = fields.filter(|_| !is_optional) else {
            continue;
        };
        // Names of extensions and hosts are required.
        fields.remove(key).unwrap();
        if key == "lb_policy" || read(&mutated).is_err() {
            count += 1;
            continue;
        }
        panic!("{position} may be missing");
    }
    assert!(count > 100, "{count}");
}

fn ways(config: &str, endpoints: &str, listener: &str) -> Vec<(u16, Way, Way)> {
    let read = read(&document(config, &json!({(KEY): endpoints}))).unwrap();
    let (v4, v6): (IpAddr, IpAddr) = (POD.parse().unwrap(), "fd00::9".parse().unwrap());
    let way = |port| {
        (
            port,
            read.way(listener, v4, port),
            read.way(listener, v6, port),
        )
    };
    [80, 8080, 8081, 8082, 8083, 8084, 15001, 15006]
        .map(way)
        .into()
}

fn way(to: Option<&str>, from: &[&str]) -> Way {
    Way {
        to: to.map(str::to_owned),
        from: from.iter().map(|it| it.parse().unwrap()).collect(),
    }
}

#[test]
fn a_port_is_forwarded_to_its_endpoint_and_any_other_to_its_original_destination() {
    let original = || (way(None, &["127.0.0.6"]), way(None, &["::6"]));
    let both = |to: &str, from: &[&str]| (way(Some(to), from), way(Some(to), from));
    let marks = ["127.0.0.6", "::6"];
    let wanted = [
        (80, original()),
        (8080, both("127.0.0.1:80", &[])),
        (8081, both("[::1]:81", &[])),
        (8082, both("10.0.0.9:82", &marks)),
        (8083, both("10.0.0.9:83", &marks)),
        (8084, both("/run/app.sock", &[])),
        (15001, original()),
        (15006, both("nowhere", &[])),
    ];
    let wanted = wanted.map(|(port, (v4, v6))| (port, v4, v6));
    assert_eq!(ways("", ENDPOINTS, "virtualInbound"), wanted);
    for (port, v4, v6) in ways("", "", "virtualInbound") {
        let to = (port == 15006).then_some("nowhere");
        assert_eq!((v4.to.as_deref(), v6.to.as_deref()), (to, to), "{port}");
    }
}

#[test]
fn outbound_goes_where_it_was_going_from_the_pods_own_address() {
    for (port, v4, v6) in ways("", ENDPOINTS, "virtualOutbound") {
        let wanted = || way((port == 15001).then_some("nowhere"), &[]);
        assert_eq!((v4, v6), (wanted(), wanted()), "{port}");
    }
}

#[test]
fn without_ipv6_nothing_of_it_is_named() {
    let endpoints = ENDPOINTS.replace("8081=[::1]:81,", "");
    let text = text("proxy: {ipv6: false}", &json!({(KEY): endpoints}));
    assert!(!text.contains("::"), "{text}");
}

#[test]
fn a_proxy_that_keeps_the_clients_address_is_transparent() {
    let listeners =
        |annotations: &Value| document("", annotations)["static_resources"]["listeners"].clone();
    let tproxy = json!({"sidecar.istio.io/interceptionMode": "TPROXY"});
    let inbound = &listeners(&tproxy)[0];
    assert_eq!(inbound["transparent"], true);
    assert_eq!(inbound["listener_filters"][1]["typed_config"]["mark"], 1337);
    let inbound = &listeners(&json!({}))[0];
    assert_eq!(inbound["listener_filters"].as_array().unwrap().len(), 1);
    assert_eq!(inbound["transparent"], Value::Null);
    let mut both = tproxy.clone();
    both[KEY] = "80=0.0.0.0:80".into();
    let message = injected("", &both).unwrap_err();
    assert!(
        message.starts_with(&format!("annotation {KEY}: ")) && message.contains("TPROXY"),
        "{message}"
    );
}

#[test]
fn an_endpoint_that_no_template_takes_is_refused() {
    let sidecar = "defaultTemplates: [usual]\naliases: {usual: [sidecar]}";
    let message = injected(sidecar, &json!({(KEY): "80=0.0.0.0:80"})).unwrap_err();
    assert!(
        message.starts_with(&format!("annotation {KEY}: ")),
        "{message}"
    );
    assert!(
        message.contains("standalone") && message.contains("Sidecar resource"),
        "{message}"
    );
    injected(sidecar, &json!({(KEY): ""})).unwrap();
    let own = "defaultTemplates: [own]\ntemplates: {own: \"spec: {containers: [{name: istio-proxy, args: [--config-yaml, '${proxy.bootstrap}']}]}\"}";
    let own = text(own, &json!({(KEY): "80=0.0.0.0:8080"}));
    assert!(own.contains("inbound|80||"), "{own}");
}

/// Returns the routes of the readiness port.
fn routes(document: &Value) -> &Value {
    let position = "/static_resources/listeners/2/filter_chains/0/filters/0/typed_config/route_config/virtual_hosts/0/routes";
    document.pointer(position).unwrap()
}

#[test]
fn a_hook_holds_the_proxys_end_up_for_as_long_as_its_path_takes_and_there_is_none_without_it() {
    let hook = json!({"preStop": {"httpGet": {"path": "/drain", "port": 15021}}});
    for (annotations, delay) in [
        (json!({}), "5s"),
        (drains("0.5s"), "1s"),
        (drains("40s"), "40s"),
    ] {
        assert_eq!(
            proxy(&injected("", &annotations).unwrap())["lifecycle"],
            hook
        );
        let document = document("", &annotations);
        let route = &routes(&document)[1];
        assert_eq!(route["match"]["path"], "/drain");
        let late = &route["typed_per_filter_config"]["envoy.filters.http.fault"]["delay"];
        assert_eq!(late["fixed_delay"], delay);
    }
    let native = json!({"sidecar.istio.io/nativeSidecar": "true"});
    for annotations in [drains("0s"), native] {
        let text = injected("", &annotations).unwrap().to_string();
        assert!(
            !text.contains("drain\"") && !text.contains("preStop"),
            "{text}"
        );
        assert!(!text.contains("http.fault"), "{text}");
    }
}

#[test]
fn a_proxy_without_an_agent_leaves_probes_alone_and_answers_its_own() {
    for annotations in [json!({}), json!({"status.sidecar.istio.io/port": "16000"})] {
        let pod = injected("", &annotations).unwrap();
        let app = &pod["spec"]["containers"][0];
        assert_eq!(app["readinessProbe"]["httpGet"]["port"], 8080);
        let probe = &proxy(&pod)["readinessProbe"]["httpGet"];
        assert_eq!(
            (&probe["port"], &probe["path"]),
            (&json!(15021), &json!("/healthz/ready"))
        );
        let env = proxy(&pod)["env"].to_string();
        assert!(
            env.contains("INSTANCE_IP") && !env.contains("PROBERS"),
            "{env}"
        );
    }
    let document = document("", &drains("0s"));
    let wanted = json!([{"match": {"path": "/healthz/ready"}, "route": {"cluster": "admin", "prefix_rewrite": "/ready"}}]);
    assert_eq!(routes(&document), &wanted);
    assert_eq!(
        document["admin"]["address"]["socket_address"]["address"],
        "127.0.0.1"
    );
}

/// 128 KiB at most (execve(2), MAX_ARG_STRLEN).
#[test]
fn the_longest_bootstrap_fits_into_one_argument() {
    let path = "a".repeat(106);
    let endpoints: Vec<_> = (0..64)
        .map(|it| format!("{}=unix:///{path}", 20_000 + it))
        .collect();
    let pods: Vec<_> = (0..64)
        .map(|it| format!("{}=0.0.0.0:{}", 20_000 + it, 30_000 + it))
        .collect();
    for endpoints in [endpoints, pods] {
        let length = text("", &json!({(KEY): endpoints.join(",")})).len();
        assert!(length > 40_000 && length < 128 * 1024 - 1, "{length}");
    }
}

#[test]
fn the_built_in_templates_redirect_alike() {
    let templates = [
        include_str!("../../src/templates/sidecar.yaml"),
        include_str!("../../src/templates/standalone.yaml"),
    ];
    let init = templates.map(|text| {
        let template: Value = serde_saphyr::from_str(text).unwrap();
        template["spec"]["initContainers"].clone()
    });
    assert_eq!(init[0].as_array().unwrap().len(), 2);
    assert_eq!(init[0], init[1]);
}

#[test]
#[ignore = "needs an Envoy: ENVOY=/path/to/envoy cargo test -p inpod-injection --test bootstrap -- --ignored"]
#[expect(clippy::disallowed_methods, reason = "asks for an Envoy")]
fn a_real_envoy_takes_every_variant() {
    let envoy = std::env::var("ENVOY").expect("ENVOY names no Envoy");
    for (config, annotations) in variants() {
        let text = text(config, &annotations);
        let arguments = ["--mode", "validate", "--config-yaml", &text];
        let output = std::process::Command::new(&envoy)
            .args(arguments)
            .output()
            .unwrap();
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{config} {annotations}: {message}");
    }
}
