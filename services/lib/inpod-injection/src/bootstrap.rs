//! Envoy without a control plane: the static equivalent of istiod's inbound forwarding
//! (services/docs/facts/istio-sidecar.md, 7). Inbound connections go to their original destination from 127.0.0.6 or
//! ::6, which the node's rules do not redirect again; outbound ones go there directly.
//!
//! Fields are Envoy's API v3 (`envoy.config.bootstrap.v3` and its imports); listeners and clusters have Istio's
//! names. As JSON in one argument, it needs no file and no ConfigMap.

mod drain;
mod endpoints;

use std::{collections::BTreeMap, net::SocketAddr};

use inpod_types::keys;
use serde_json::{Value, json};

pub(crate) use endpoints::parse;

use crate::{
    error::InjectError,
    json,
    proxy::{Interception, ProxySettings},
};
use endpoints::Endpoint;

pub(crate) const VARIABLE: (&str, &str) = (
    "proxy.bootstrap",
    "JSON: bootstrap of an Envoy without control plane and agent; needs INSTANCE_IP in its environment",
);

/// Targets of redirection (services/docs/facts/istio-sidecar.md, 4.1).
const OUTBOUND: u16 = 15001;
const INBOUND: u16 = 15006;

/// Admin interface, on localhost only; the next two ports expose one path each.
const ADMIN: u16 = 15000;
const HEALTH: u16 = 15021;
const PROMETHEUS: u16 = 15090;

/// Addresses whose connections are not redirected (7.2).
const SOURCE_IPV4: &str = "127.0.0.6";
const SOURCE_IPV6: &str = "::6";

/// Marks connections that keep the client's address: their replies return to the proxy (4.4.2).
const TPROXY_MARK: u32 = 1337;

const PASSTHROUGH: &str = "PassthroughCluster";
const BLACK_HOLE: &str = "BlackHoleCluster";
const INBOUND_IPV4: &str = "InboundPassthroughClusterIpv4";
const INBOUND_IPV6: &str = "InboundPassthroughClusterIpv6";
const ADMIN_CLUSTER: &str = "admin";

/// The kubelet inserts the pod's address (Kubernetes, "Define Dependent Environment Variables").
const POD_ADDRESS: &str = "$(INSTANCE_IP)";

struct Bootstrap {
    endpoints: BTreeMap<u16, Endpoint>,
    is_tproxy: bool,
    has_ipv6: bool,
    drain: u64,
}

/// Renders a pod's bootstrap.
///
/// # Errors
///
/// If the endpoints are invalid or conflict with the interception mode.
pub(crate) fn render(
    pod: &Value,
    proxy: &ProxySettings,
    has_ipv6: bool,
) -> Result<String, InjectError> {
    let text = json::annotation(pod, keys::DEFAULT_ENDPOINTS).unwrap_or_default();
    let wrong = |why: String| InjectError::annotation(keys::DEFAULT_ENDPOINTS, &why);
    let endpoints = parse(text).map_err(wrong)?;
    let is_tproxy = proxy.interception == Interception::Tproxy;
    if is_tproxy && !endpoints.is_empty() {
        let why = "interceptionMode TPROXY keeps the client's address and the original destination; use REDIRECT, or remove the annotation";
        return Err(wrong(why.to_owned()));
    }
    let bootstrap = Bootstrap {
        endpoints,
        is_tproxy,
        has_ipv6,
        drain: proxy.drain,
    };
    Ok(bootstrap.document().to_string())
}

/// Rejects endpoints that no template uses.
pub(crate) fn reject_endpoints(pod: &Value) -> Result<(), InjectError> {
    let text = json::annotation(pod, keys::DEFAULT_ENDPOINTS);
    if text.is_none_or(|text| text.trim().is_empty()) {
        return Ok(());
    }
    let why = "no template of this pod uses proxy.bootstrap, and Istio's proxy takes endpoints from a Sidecar resource; use the template standalone, or remove the annotation";
    Err(InjectError::annotation(
        keys::DEFAULT_ENDPOINTS,
        &why.to_owned(),
    ))
}

impl Bootstrap {
    fn document(&self) -> Value {
        let metrics = "/stats/prometheus";
        let listeners = [
            self.inbound(),
            self.outbound(),
            self.health(),
            self.http_listener(
                "prometheus",
                PROMETHEUS,
                connection_manager("prometheus", &[route(metrics, metrics)]),
            ),
        ];
        json!({
            "admin": {"address": tcp("127.0.0.1", ADMIN)},
            "static_resources": {"listeners": listeners, "clusters": self.clusters()},
        })
    }

    /// Gives IPv6 a socket of its own: only IPv4 sockets return IPv4 original destinations.
    fn listener(&self, name: &str, port: u16, rest: Value) -> Value {
        let mut listener = json!({"name": name, "address": tcp("0.0.0.0", port)});
        let more = self
            .has_ipv6
            .then(|| json!({"additional_addresses": [{"address": tcp("::", port)}]}));
        for part in [Some(rest), more].into_iter().flatten() {
            extend_object(&mut listener, part);
        }
        listener
    }

    fn inbound(&self) -> Value {
        let mut chains = vec![black_hole("virtualInbound-blackhole", INBOUND)];
        chains.extend(self.endpoints.keys().map(|port| {
            let cluster = cluster_name(*port);
            let matcher = json!({"destination_port": port});
            chain(&cluster, Some(matcher), &cluster)
        }));
        chains.push(family_chain("0.0.0.0", INBOUND_IPV4));
        chains.extend(self.has_ipv6.then(|| family_chain("::", INBOUND_IPV6)));
        let mut filters = vec![original_dst()];
        filters.extend(self.is_tproxy.then(original_src));
        let mut rest = json!({
            "traffic_direction": "INBOUND",
            "listener_filters": filters,
            "filter_chains": chains,
        });
        if self.is_tproxy {
            extend_object(&mut rest, json!({"transparent": true}));
        }
        self.listener("virtualInbound", INBOUND, rest)
    }

    fn outbound(&self) -> Value {
        let rest = json!({
            "traffic_direction": "OUTBOUND",
            "listener_filters": [original_dst()],
            "filter_chains": [black_hole("virtualOutbound-blackhole", OUTBOUND)],
            "default_filter_chain": chain("virtualOutbound-catchall-tcp", None, PASSTHROUGH),
        });
        self.listener("virtualOutbound", OUTBOUND, rest)
    }

    /// Serves readiness and, to `preStop`, the end of draining.
    fn health(&self) -> Value {
        let ready = route("/healthz/ready", "/ready");
        let manager = if self.drain == 0 {
            connection_manager("health", &[ready])
        } else {
            drain::connection_manager(
                connection_manager("health", &[ready, drain::route(self.drain)]),
                self.drain,
            )
        };
        self.http_listener("health", HEALTH, manager)
    }

    fn http_listener(&self, name: &str, port: u16, manager: Value) -> Value {
        let kind =
            "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager";
        let manager = extension(
            "envoy.filters.network.http_connection_manager",
            kind,
            manager,
        );
        self.listener(
            name,
            port,
            json!({"filter_chains": [{"filters": [manager]}]}),
        )
    }

    fn clusters(&self) -> Vec<Value> {
        let mut clusters = vec![
            json!({"name": BLACK_HOLE, "type": "STATIC", "connect_timeout": CONNECT_TIMEOUT}),
            static_cluster(ADMIN_CLUSTER, &tcp("127.0.0.1", ADMIN), json!({})),
            original_dst_cluster(PASSTHROUGH, json!({})),
            original_dst_cluster(INBOUND_IPV4, source_bind(SOURCE_IPV4, None)),
        ];
        clusters.extend(
            self.has_ipv6
                .then(|| original_dst_cluster(INBOUND_IPV6, source_bind(SOURCE_IPV6, None))),
        );
        clusters.extend(self.endpoints.iter().map(|(port, endpoint)| {
            let name = cluster_name(*port);
            match endpoint {
                Endpoint::Localhost(to) => static_cluster(&name, &socket(*to), json!({})),
                Endpoint::Unix(path) => {
                    static_cluster(&name, &json!({"pipe": {"path": path}}), json!({}))
                }
                Endpoint::Pod(port) => {
                    let bind = source_bind(SOURCE_IPV4, self.has_ipv6.then_some(SOURCE_IPV6));
                    static_cluster(&name, &tcp(POD_ADDRESS, *port), bind)
                }
            }
        }));
        clusters
    }
}

/// Istio's default (`MeshConfig.connectTimeout`).
const CONNECT_TIMEOUT: &str = "10s";

fn cluster_name(port: u16) -> String {
    format!("inbound|{port}||")
}

fn extend_object(base: &mut Value, over: Value) {
    if let (Value::Object(base), Value::Object(over)) = (base, over) {
        base.extend(over);
    }
}

fn tcp(address: &str, port: u16) -> Value {
    json!({"socket_address": {"address": address, "port_value": port}})
}

fn socket(address: SocketAddr) -> Value {
    tcp(&address.ip().to_string(), address.port())
}

fn extension(name: &str, kind: &str, config: Value) -> Value {
    json!({"name": name, "typed_config": typed(kind, config)})
}

fn typed(kind: &str, mut config: Value) -> Value {
    let kind = json!({"@type": format!("type.googleapis.com/{kind}")});
    extend_object(&mut config, kind);
    config
}

fn original_dst() -> Value {
    let kind = "envoy.extensions.filters.listener.original_dst.v3.OriginalDst";
    extension("envoy.filters.listener.original_dst", kind, json!({}))
}

/// Keeps the client's address; the mark routes replies back.
fn original_src() -> Value {
    let kind = "envoy.extensions.filters.listener.original_src.v3.OriginalSrc";
    let mark = json!({"mark": TPROXY_MARK});
    extension("envoy.filters.listener.original_src", kind, mark)
}

/// Serves HTTP for only these routes.
fn connection_manager(name: &str, routes: &[Value]) -> Value {
    let host = json!({"name": name, "domains": ["*"], "routes": routes});
    let kind = "envoy.extensions.filters.http.router.v3.Router";
    json!({
        "stat_prefix": name,
        "route_config": {"name": name, "virtual_hosts": [host]},
        "http_filters": [extension("envoy.filters.http.router", kind, json!({}))],
    })
}

/// Forwards to a path of the admin interface.
fn route(path: &str, by: &str) -> Value {
    json!({"match": {"path": path}, "route": {"cluster": ADMIN_CLUSTER, "prefix_rewrite": by}})
}

/// Has no idle timeout: Envoy's default closes connections after an hour.
fn chain(name: &str, matcher: Option<Value>, cluster: &str) -> Value {
    let proxy = json!({"stat_prefix": cluster, "cluster": cluster, "idle_timeout": "0s"});
    let kind = "envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy";
    let proxy = extension("envoy.filters.network.tcp_proxy", kind, proxy);
    let mut chain = json!({"name": name, "filters": [proxy]});
    if let Some(matcher) = matcher {
        extend_object(&mut chain, json!({"filter_chain_match": matcher}));
    }
    chain
}

/// Connections to the listener's own port would loop.
fn black_hole(name: &str, port: u16) -> Value {
    chain(name, Some(json!({"destination_port": port})), BLACK_HOLE)
}

fn family_chain(any: &str, cluster: &str) -> Value {
    let matcher = json!({"prefix_ranges": [{"address_prefix": any, "prefix_len": 0}]});
    chain(cluster, Some(matcher), cluster)
}

/// Lifts Envoy's limits (1024 each), which would reject what the application alone accepts.
fn unlimited() -> Value {
    let thresholds = json!({
        "max_connections": u32::MAX,
        "max_pending_requests": u32::MAX,
        "max_requests": u32::MAX,
    });
    json!({"thresholds": [thresholds]})
}

fn original_dst_cluster(name: &str, bind: Value) -> Value {
    let mut cluster = json!({
        "name": name,
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "connect_timeout": CONNECT_TIMEOUT,
        "circuit_breakers": unlimited(),
    });
    extend_object(&mut cluster, bind);
    cluster
}

fn static_cluster(name: &str, address: &Value, bind: Value) -> Value {
    let endpoint = json!({"endpoint": {"address": address}});
    let mut cluster = json!({
        "name": name,
        "type": "STATIC",
        "connect_timeout": CONNECT_TIMEOUT,
        "circuit_breakers": unlimited(),
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]},
    });
    extend_object(&mut cluster, bind);
    cluster
}

/// Lists two addresses; Envoy uses the destination's family.
fn source_bind(source: &str, other: Option<&str>) -> Value {
    let any = |address: &str| json!({"address": address, "port_value": 0});
    let mut bind = json!({"source_address": any(source)});
    if let Some(other) = other {
        let more = json!({"extra_source_addresses": [{"address": any(other)}]});
        extend_object(&mut bind, more);
    }
    json!({"upstream_bind_config": bind})
}
