//! A bootstrap for an Envoy without a control plane, with the names and the forwarding of the listeners and clusters that
//! istiod sends (services/docs/facts/istio-sidecar.md, 7).

use inpod_proto::netconfig::v1::InboundCapture;
use serde_json::{Value, json};

pub(super) const ADMIN: u16 = 15000;
const OUTBOUND: u16 = 15001;
const INBOUND: u16 = 15006;

pub(super) fn of(capture: InboundCapture) -> Value {
    let is_tproxy = capture == InboundCapture::Tproxy;
    let mut filters = vec![json!({
        "name": "envoy.filters.listener.original_dst",
        "typed_config": typed("filters.listener.original_dst.v3.OriginalDst"),
    })];
    let mut original_src = typed("filters.listener.original_src.v3.OriginalSrc");
    original_src["mark"] = 1337.into();
    filters.extend(is_tproxy.then(
        || json!({"name": "envoy.filters.listener.original_src", "typed_config": original_src}),
    ));
    let of_family = |any: &str, cluster: &str| {
        let mut chain = chain(cluster);
        let any = json!({"address_prefix": any, "prefix_len": 0});
        chain["filter_chain_match"] = json!({"prefix_ranges": [any]});
        chain
    };
    let inbound = json!({
        "name": "virtualInbound",
        "address": address("0.0.0.0", INBOUND),
        "additional_addresses": [{"address": address("::", INBOUND)}],
        "transparent": is_tproxy,
        "listener_filters": filters,
        "filter_chains": [
            of_family("0.0.0.0", "InboundPassthroughClusterIpv4"),
            of_family("::", "InboundPassthroughClusterIpv6"),
        ],
    });
    let outbound = json!({
        "name": "virtualOutbound",
        "address": address("0.0.0.0", OUTBOUND),
        "additional_addresses": [{"address": address("::", OUTBOUND)}],
        "listener_filters": [filters[0]],
        "filter_chains": [chain("PassthroughCluster")],
    });
    // Connections from these addresses are not redirected again.
    let clusters = [
        cluster("PassthroughCluster", None),
        cluster("InboundPassthroughClusterIpv4", Some("127.0.0.6")),
        cluster("InboundPassthroughClusterIpv6", Some("::6")),
    ];
    json!({
        "admin": {"address": address("127.0.0.1", ADMIN)},
        "static_resources": {"listeners": [inbound, outbound], "clusters": clusters},
    })
}

fn typed(name: &str) -> Value {
    json!({"@type": format!("type.googleapis.com/envoy.extensions.{name}")})
}

fn address(ip: &str, port: u16) -> Value {
    json!({"socket_address": {"address": ip, "port_value": port}})
}

fn chain(cluster: &str) -> Value {
    let mut proxy = typed("filters.network.tcp_proxy.v3.TcpProxy");
    proxy["stat_prefix"] = cluster.into();
    proxy["cluster"] = cluster.into();
    json!({"filters": [{"name": "envoy.filters.network.tcp_proxy", "typed_config": proxy}]})
}

fn cluster(name: &str, source: Option<&str>) -> Value {
    let bind = source.map(|ip| json!({"source_address": {"address": ip, "port_value": 0}}));
    json!({
        "name": name,
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "upstream_bind_config": bind,
    })
}
