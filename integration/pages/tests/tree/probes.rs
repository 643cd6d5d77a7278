//! Every container is probed by HTTP at the address that it serves; where pods share the node's network, from there only.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use crate::{list, manifests, rights::pods, text};

/// Returns the containers that run until they are stopped, by manifest, each with its pod.
fn servers() -> Vec<(String, Value, Value)> {
    let mut found = Vec::new();
    for manifest in manifests() {
        for (workload, pod) in pods(&manifest) {
            if workload == "inpod-leave" {
                continue;
            }
            for container in list(&pod["spec"], "containers") {
                let at = format!("{manifest} {}", text(container, "/name"));
                found.push((at, container.clone(), pod.clone()));
            }
        }
    }
    found
}

/// Returns host and port of the setting `health_address`.
fn served(container: &Value) -> (String, u16) {
    let mut env = list(container, "env").iter();
    let setting = env.find(|it| it["name"] == "INPOD_HEALTH_ADDRESS");
    let address = text(setting.unwrap(), "/value");
    let (host, port) = address.rsplit_once(':').unwrap();
    (host.to_owned(), port.parse().unwrap())
}

#[test]
fn every_container_has_three_probes_and_none_runs_a_program() {
    let servers = servers();
    assert!(servers.len() > 30, "{}", servers.len());
    for (at, container, pod) in servers {
        let (host, port) = served(&container);
        let is_of_node = pod["spec"]["hostNetwork"] == true;
        // A pod that shares the node's network must not answer other machines.
        assert_eq!(host, if is_of_node { "127.0.0.1" } else { "[::]" }, "{at}");
        for (probe, path) in [
            ("startupProbe", "/livez"),
            ("livenessProbe", "/livez"),
            ("readinessProbe", "/readyz"),
        ] {
            let probe = &container[probe];
            let mut wanted = json!({"path": path, "port": port});
            if is_of_node {
                wanted["host"] = json!(host);
            }
            assert_eq!(probe["httpGet"], wanted, "{at}");
            for other in ["exec", "grpc", "tcpSocket"] {
                assert_eq!(probe[other], Value::Null, "{at}");
            }
            // A client that does not finish its request is disconnected after 2 s.
            assert!(probe["timeoutSeconds"].as_u64().unwrap() > 2, "{at}");
        }
    }
}

#[test]
fn each_service_has_a_port_of_its_own_that_is_none_of_istios() {
    let mut ports = BTreeMap::new();
    for (at, container, _) in servers() {
        let name = text(&container, "/name").to_owned();
        let port = served(&container).1;
        assert_eq!(*ports.entry(name).or_insert(port), port, "{at}");
    }
    assert_eq!(ports.len(), 6, "{ports:?}");
    let distinct: BTreeSet<_> = ports.values().copied().collect();
    assert_eq!(distinct.len(), ports.len(), "{ports:?}");
    // istio.io, "Ports used by Istio"; 15014 is also pod-events' for metrics.
    let mut istio = (15000..=15021).chain([15053, 15080, 15090, 15443]);
    assert!(istio.all(|port| !distinct.contains(&port)), "{ports:?}");
}
