//! Pods with Istio's agent and an Envoy that istiod configures, beside ambient pods. The Envoy comes from a package
//! registry, without Istio's own filters, which istiod leaves out (`control::SIDECARS`, `manifests/hbone.yaml`).

use std::thread;

use anyhow::{Context as _, ensure};
use integration::{
    Carried, TIMEOUT, eventually,
    kubernetes::{Image, LONG, ask, get, text},
};
use serde_json::{Value, json};

use crate::{
    cluster::{
        agent::{AGENT, ExclusiveCluster, SYSTEM, inpod_on, named, uid},
        apps::{PORT, SERVE, address, container},
        injected::INJECTOR,
        repaired::{REPAIR, event, last_end, peer},
        sidecar::{WHO, load, until_redirected},
    },
    mesh::{
        apps::{App, make_ambient, netns_of},
        control::{SIDECARS, on_proxies, on_warned_proxies},
        identity::{carried, demand_mutual_tls},
    },
};

/// The address from which Envoy calls its application.
const ENVOY: &str = "127.0.0.6";

/// The values for inpod's injector, with the same settings of proxies as in `control::SIDECARS`.
const INJECTION: [&str; 5] = [
    "injector.enabled=true",
    "injector.config.proxy.image=inpod.test/proxyv2:1",
    "injector.config.proxyConfig.proxyMetadata.PEER_METADATA_DISCOVERY=false",
    "injector.config.proxyConfig.proxyMetadata.ISTIO_META_ISTIO_VERSION=1.29.1",
    "injector.config.proxyConfig.proxyMetadata.ISTIO_META_ENABLE_HBONE=true",
];

/// An ambient application on the first node and one with a sidecar on the second, each of which demands mutual TLS.
struct Pair<'a> {
    cluster: &'a ExclusiveCluster<'a>,
    ambient: App<'a>,
    sidecar: App<'a>,
}

impl<'a> Pair<'a> {
    fn deploy(cluster: &'a ExclusiveCluster<'a>) -> Self {
        make_ambient(cluster, "shop");
        make_injected(cluster, "cars");
        let [here, there] = [0, 1].map(|index| cluster.machines().get(index));
        let pair = Self {
            ambient: App::deploy(cluster, "shop", "web", here, 1),
            sidecar: App::deploy_with(cluster, ("cars", "car"), there, 1, &probed()),
            cluster,
        };
        for namespace in ["shop", "cars"] {
            demand_mutual_tls(cluster, namespace);
        }
        pair
    }

    /// Expects that both serve each other with proven identities, and a client outside the mesh neither.
    fn serve_each_other(&self) {
        let (web, car) = (self.ambient.pod(), self.sidecar.pod());
        for pod in [&web, &car] {
            eventually("plaintext is refused", TIMEOUT, || {
                let answer = get(&self.cluster.outside, address(pod));
                ensure!(answer.is_err(), "{answer:?}");
                anyhow::Ok(())
            })
            .unwrap();
        }
        let from = netns_of(self.cluster, &web);
        let seen = eventually("the sidecar serves the ambient pod", LONG, || {
            ask(&from, self.sidecar.virtual_address(), WHO).map(|(_, seen)| seen)
        })
        .unwrap();
        assert!(seen.contains(ENVOY), "{seen}");
        let from = netns_of(self.cluster, &car);
        eventually("the ambient pod serves the sidecar", LONG, || {
            ask(&from, self.ambient.virtual_address(), WHO)
        })
        .unwrap();
        for is_outbound in [true, false] {
            self.until_proven(&web, is_outbound);
        }
        eventually("Envoy's log has both connections", TIMEOUT, || {
            let log = log_of(self.cluster, &car);
            for clusters in ["inbound|8080||", "outbound|80||web.shop.svc.cluster.local"] {
                ensure!(log.contains(clusters), "{clusters}: {log}");
            }
            anyhow::Ok(())
        })
        .unwrap();
    }

    /// Waits until the ztunnel of the ambient pod reports a connection to or from the sidecar with both identities.
    fn until_proven(&self, web: &Value, is_outbound: bool) {
        let [web_id, car_id] = [("shop", "web"), ("cars", "car")].map(|(namespace, account)| {
            Some(format!(
                "spiffe://cluster.local/ns/{namespace}/sa/{account}"
            ))
        });
        let (source, destination) = if is_outbound {
            (web_id, car_id)
        } else {
            (car_id, web_id)
        };
        let is_meant = |it: &Carried| {
            it.is_outbound == is_outbound
                && it.source_identity == source
                && it.destination_identity == destination
                && it.hbone.is_some()
        };
        eventually("ztunnel's log has the connection", TIMEOUT, || {
            let all = carried(self.cluster, web);
            ensure!(all.iter().any(is_meant), "{all:?}");
            anyhow::Ok(())
        })
        .unwrap();
    }

    fn remove(&self) {
        for namespace in ["shop", "cars"] {
            self.cluster.remove(namespace);
        }
    }
}

fn make_injected(cluster: &ExclusiveCluster<'_>, namespace: &str) {
    let labels = json!({"istio-injection": "enabled"});
    cluster.make_namespace(namespace, &labels).unwrap();
}

/// Returns an application whose probes the agent answers.
fn probed() -> Value {
    container(&json!({
        "readinessProbe": {"httpGet": {"path": WHO, "port": PORT}, "periodSeconds": 1, "timeoutSeconds": 5},
        "livenessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1, "timeoutSeconds": 5},
    }))
}

/// Returns an application without probes, whose script is changed.
fn changed(from: &str, to: &str) -> Value {
    let script = SERVE.replace(from, to);
    assert_ne!(script, SERVE);
    container(&json!({"command": ["/bin/sh", "-c", script], "readinessProbe": null}))
}

fn log_of(cluster: &ExclusiveCluster<'_>, pod: &Value) -> String {
    cluster.machine_of(pod).log_of(uid(pod)).unwrap()
}

/// Expects that the kubelet asks the agent instead of the application, which then sees the agent.
fn assert_rewritten(cluster: &ExclusiveCluster<'_>, pod: &Value) {
    for (probe, path) in [
        ("readinessProbe", "/app-health/app/readyz"),
        ("livenessProbe", "/app-health/app/livez"),
    ] {
        let containers = pod.pointer("/spec/containers").and_then(Value::as_array);
        let app = containers.into_iter().flatten();
        let app = app
            .into_iter()
            .find(|it| text(it, "/name") == "app")
            .unwrap();
        let rewritten = text(app, &format!("/{probe}/httpGet/path"));
        assert_eq!(rewritten, path, "{app}");
    }
    assert!(
        !log_of(cluster, pod).contains("app-health"),
        "a probe met Envoy"
    );
}

#[test]
fn sidecar_of_istiods_injector_serves_ambient_pods_and_is_served() {
    on_proxies(|cluster| {
        let pair = Pair::deploy(cluster);
        let pod = pair.sidecar.pod();
        until_redirected(cluster, &pod, "podnet");
        assert_rewritten(cluster, &pod);
        pair.serve_each_other();
        pair.remove();
    });
}

#[test]
fn sidecar_of_inpods_injector_serves_ambient_pods_and_is_served() {
    on_proxies(|cluster| {
        load(
            cluster,
            &[Image::Shipped("injector"), Image::Shipped("validate")],
        );
        // deploy/docs/injector.md demands the removal.
        let webhook = ["mutatingwebhookconfiguration", "istio-sidecar-injector"];
        cluster
            .kubectl(&[&["delete"][..], &webhook].concat())
            .unwrap();
        cluster.upgrade(&INJECTION);
        cluster.until_rolled(2);
        cluster.until_ready(SYSTEM, INJECTOR, 2).unwrap();
        let pair = Pair::deploy(cluster);
        let pod = pair.sidecar.pod();
        let validation = text(&pod, "/spec/initContainers/0/image");
        assert!(validation.starts_with("localhost/validate:"), "{pod}");
        until_redirected(cluster, &pod, "podnet");
        assert_rewritten(cluster, &pod);
        pair.serve_each_other();
        pair.remove();
        cluster.upgrade(&[]);
        cluster.until_rolled(2);
        cluster.deploy_istiod(&SIDECARS);
    });
}

#[test]
fn sidecar_drains_before_its_pod_ends() {
    on_proxies(|cluster| {
        make_injected(cluster, "cars");
        let slow = changed("echo $REMOTE_ADDR\n", "sleep 5\necho $REMOTE_ADDR\n");
        let slow = App::deploy_with(cluster, ("cars", "slow"), None, 1, &slow);
        let pod = slow.pod();
        let (outside, to) = (&cluster.outside, address(&pod));
        eventually("Envoy serves", LONG, || get(outside, to)).unwrap();
        let (namespace, name) = named(&pod);
        let delete = ["delete", "pod", "--namespace", namespace, name];
        let gently = ["--grace-period=20", "--wait=false"];
        let answer = thread::scope(|scope| {
            let request = scope.spawn(|| ask(outside, to, WHO));
            cluster.kubectl(&[&delete[..], &gently].concat()).unwrap();
            eventually("the agent drains Envoy", TIMEOUT, || {
                let log = log_of(cluster, &pod);
                ensure!(log.contains("handling /drain, starting drain"), "{log}");
                anyhow::Ok(())
            })
            .unwrap();
            request.join().unwrap()
        });
        let (_, seen) = answer.unwrap();
        assert!(seen.contains(ENVOY), "{seen}");
        let failed = cluster
            .server
            .get("/api/v1/namespaces/cars/events")
            .unwrap();
        let failed = failed.to_string();
        assert!(!failed.contains("FailedPreStopHook"), "{failed}");
        cluster.remove("cars");
    });
}

#[test]
fn istiods_sidecar_leads_to_an_application_on_localhost() {
    on_proxies(|cluster| {
        make_injected(cluster, "cars");
        let local = changed("httpd -f -p 8080", "httpd -f -p 127.0.0.1:8080");
        let local = App::deploy_with(cluster, ("cars", "local"), None, 1, &local);
        let open = App::deploy(cluster, "cars", "open", None, 1);
        let (pod, open) = (local.pod(), open.pod());
        eventually("Envoy serves what listens everywhere", LONG, || {
            get(&cluster.outside, address(&open))
        })
        .unwrap();
        // Since Istio 1.10, Envoy calls the address that the client dialed.
        let refused = get(&cluster.outside, address(&pod));
        refused.expect_err("an application on localhost is reached");
        let name = format!("{}/{}", named(&pod).0, named(&pod).1);
        let binds = inpod_on(cluster.machine_of(&pod), &["binds", &name]).unwrap();
        let row = binds.lines().find(|row| row.contains("8080/TCP"));
        assert!(
            row.context(binds.clone()).unwrap().contains("localhost"),
            "{binds}"
        );
        let document = include_str!("manifests/default-endpoint.yaml");
        cluster.server.apply(document).unwrap();
        eventually("Envoy calls localhost", LONG, || {
            get(&cluster.outside, address(&pod))
        })
        .unwrap();
        get(&cluster.outside, address(&open)).unwrap();
        cluster.remove("cars");
    });
}

#[test]
fn pod_that_failed_the_agents_own_validation_is_repaired_in_place() {
    on_warned_proxies(|cluster| {
        load(cluster, &[Image::Shipped("repair")]);
        cluster.uninstall();
        make_injected(cluster, "cars");
        let car = App::start(
            cluster,
            ("cars", "car"),
            cluster.machines().first(),
            1,
            &probed(),
        );
        let before = eventually("the validation has failed", LONG, || {
            let pods = cluster.pods("cars", "app=car")?;
            let pod = pods.first().context("no pod")?.clone();
            last_end(&pod).with_context(|| format!("not yet: {pod}"))?;
            anyhow::Ok(pod)
        })
        .unwrap();
        let end = last_end(&before).unwrap();
        assert_eq!(end.get("exitCode"), Some(&json!(126)), "{end}");
        cluster.make_system();
        cluster.upgrade(&["repair.enabled=true", peer()]);
        cluster.until_ready(SYSTEM, AGENT, 2).unwrap();
        cluster.until_ready(SYSTEM, REPAIR, 2).unwrap();
        let after = car.pod();
        assert_eq!(uid(&after), uid(&before));
        until_redirected(cluster, &after, "");
        let note = event(cluster, &before, "RepairBrokenPod", "Normal");
        assert!(note.contains("redirected now"), "{note}");
        let (_, seen) = ask(&cluster.outside, address(&after), WHO).unwrap();
        assert!(seen.contains(ENVOY), "{seen}");
        cluster.remove("cars");
        cluster.upgrade(&[]);
        cluster.until_rolled(2);
        cluster.until_whole();
    });
}
