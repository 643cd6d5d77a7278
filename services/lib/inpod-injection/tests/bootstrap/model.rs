//! The parts of Envoy's API v3 that the bootstrap uses, with types, required fields and bounds. From the .proto files
//! of github.com/envoyproxy/data-plane-api at 84e84367 (2026-01-29), packages
//! `envoy.config.{bootstrap,listener,cluster,endpoint,route,core}.v3` and `envoy.extensions.filters`, in proto3's
//! JSON: a oneof is one key, an Any has `@type` among its fields, a Duration is a string that ends in `s`.

mod checks;

use std::net::IpAddr;

use serde::{Deserialize, Deserializer, de::Error as _};

pub(crate) use checks::Way;

/// The API's `(validate.rules).string = {min_len: 1}`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Name(pub(crate) String);

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let empty = || D::Error::custom("an empty text");
        (!text.is_empty()).then_some(Self(text)).ok_or_else(empty)
    }
}

/// A `google.protobuf.Duration` in nanoseconds.
#[derive(Debug)]
pub(crate) struct Duration(u128);

impl<'de> Deserialize<'de> for Duration {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let seconds = text
            .strip_suffix('s')
            .and_then(|text| text.parse::<u64>().ok());
        let wrong = || D::Error::custom(format!("{text:?} is no duration"));
        seconds
            .map(|it| Self(u128::from(it) * 1_000_000_000))
            .ok_or_else(wrong)
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Bootstrap {
    admin: Admin,
    static_resources: StaticResources,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Admin {
    address: Address,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct StaticResources {
    listeners: Vec<Listener>,
    clusters: Vec<Cluster>,
}

/// A required oneof of Envoy.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "snake_case")]
enum Address {
    SocketAddress(SocketAddress),
    Pipe(Pipe),
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(deny_unknown_fields)]
struct SocketAddress {
    address: IpAddr,
    port_value: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(deny_unknown_fields)]
struct Pipe {
    path: Name,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Listener {
    name: Name,
    address: Address,
    #[serde(default)]
    additional_addresses: Vec<AdditionalAddress>,
    #[serde(rename = "traffic_direction")]
    _direction: Option<TrafficDirection>,
    #[serde(rename = "transparent")]
    _transparent: Option<bool>,
    #[serde(default)]
    listener_filters: Vec<ListenerFilter>,
    filter_chains: Vec<FilterChain>,
    default_filter_chain: Option<FilterChain>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct AdditionalAddress {
    address: Address,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
enum TrafficDirection {
    Unspecified,
    Inbound,
    Outbound,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ListenerFilter {
    name: Name,
    #[serde(rename = "typed_config")]
    _config: ListenerFilterConfig,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "@type")]
enum ListenerFilterConfig {
    #[serde(
        rename = "type.googleapis.com/envoy.extensions.filters.listener.original_dst.v3.OriginalDst"
    )]
    OriginalDst(Nothing),
    #[serde(
        rename = "type.googleapis.com/envoy.extensions.filters.listener.original_src.v3.OriginalSrc"
    )]
    OriginalSrc(#[expect(dead_code, reason = "that it is read is all that is asked")] OriginalSrc),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Nothing {}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct OriginalSrc {
    #[serde(rename = "mark")]
    _mark: u32,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FilterChain {
    name: Option<Name>,
    filter_chain_match: Option<FilterChainMatch>,
    filters: Vec<Filter>,
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(deny_unknown_fields)]
struct FilterChainMatch {
    destination_port: Option<std::num::NonZeroU16>,
    #[serde(default)]
    prefix_ranges: Vec<CidrRange>,
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(deny_unknown_fields)]
struct CidrRange {
    address_prefix: IpAddr,
    prefix_len: Option<u8>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Filter {
    #[serde(rename = "name")]
    _name: Name,
    typed_config: FilterConfig,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "@type")]
enum FilterConfig {
    #[serde(rename = "type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy")]
    TcpProxy(TcpProxy),
    #[serde(
        rename = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
    )]
    Http(HttpConnectionManager),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TcpProxy {
    #[serde(rename = "stat_prefix")]
    _stat_prefix: Name,
    cluster: Name,
    #[serde(rename = "idle_timeout")]
    _idle_timeout: Option<Duration>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct HttpConnectionManager {
    #[serde(rename = "stat_prefix")]
    _stat_prefix: Name,
    #[serde(rename = "stream_idle_timeout")]
    _stream_idle_timeout: Option<Duration>,
    route_config: RouteConfiguration,
    http_filters: Vec<HttpFilter>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct HttpFilter {
    #[serde(rename = "name")]
    _name: Name,
    typed_config: HttpFilterConfig,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "@type")]
enum HttpFilterConfig {
    #[serde(rename = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router")]
    Router(Nothing),
    #[serde(rename = "type.googleapis.com/envoy.extensions.filters.http.fault.v3.HTTPFault")]
    Fault(HttpFault),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct HttpFault {
    delay: Option<FaultDelay>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FaultDelay {
    fixed_delay: Duration,
    #[serde(rename = "percentage")]
    _percentage: Option<FractionalPercent>,
}

/// The default denominator is a hundred.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FractionalPercent {
    #[serde(rename = "numerator")]
    _numerator: Option<u32>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RouteConfiguration {
    #[serde(rename = "name")]
    _name: Option<Name>,
    virtual_hosts: Vec<VirtualHost>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct VirtualHost {
    name: Name,
    domains: Vec<Name>,
    routes: Vec<Route>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Route {
    #[serde(rename = "match")]
    _match: RouteMatch,
    /// Exactly one is required.
    route: Option<RouteAction>,
    direct_response: Option<DirectResponse>,
    typed_per_filter_config: Option<PerFilter>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct DirectResponse {
    status: u16,
}

/// By filter names of the chain.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PerFilter {
    #[serde(rename = "envoy.filters.http.fault")]
    fault: Option<HttpFilterConfig>,
}

/// A required oneof of Envoy.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "snake_case")]
enum RouteMatch {
    Path(#[expect(dead_code, reason = "that it is a text is all that is asked")] Name),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RouteAction {
    cluster: Name,
    #[serde(rename = "prefix_rewrite")]
    _prefix_rewrite: Option<Name>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
enum DiscoveryType {
    #[serde(rename = "STATIC")]
    Static,
    #[serde(rename = "ORIGINAL_DST")]
    OriginalDst,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
enum LbPolicy {
    #[serde(rename = "CLUSTER_PROVIDED")]
    ClusterProvided,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Cluster {
    name: Name,
    r#type: DiscoveryType,
    lb_policy: Option<LbPolicy>,
    connect_timeout: Duration,
    #[serde(rename = "circuit_breakers")]
    _circuit_breakers: Option<CircuitBreakers>,
    load_assignment: Option<ClusterLoadAssignment>,
    upstream_bind_config: Option<BindConfig>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CircuitBreakers {
    #[serde(rename = "thresholds")]
    _thresholds: Vec<Thresholds>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Thresholds {
    #[serde(rename = "max_connections")]
    _connections: Option<u32>,
    #[serde(rename = "max_pending_requests")]
    _pending: Option<u32>,
    #[serde(rename = "max_requests")]
    _requests: Option<u32>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ClusterLoadAssignment {
    #[serde(rename = "cluster_name")]
    _cluster_name: Name,
    endpoints: Vec<LocalityLbEndpoints>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LocalityLbEndpoints {
    lb_endpoints: Vec<LbEndpoint>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LbEndpoint {
    endpoint: Endpoint,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Endpoint {
    address: Address,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct BindConfig {
    source_address: SocketAddress,
    #[serde(default)]
    extra_source_addresses: Vec<ExtraSourceAddress>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ExtraSourceAddress {
    address: SocketAddress,
}
