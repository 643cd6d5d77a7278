//! The parts of Envoy's API v3 that the bootstrap uses, and no more: names and types of fields, what is required, and the
//! bounds that Envoy checks. Read off the .proto files of github.com/envoyproxy/data-plane-api at 84e84367 (2026-01-29):
//! envoy/config/{bootstrap,listener,cluster,endpoint,route,core}/v3 and envoy/extensions/filters/.../v3. JSON is that of
//! proto3: a oneof is one key, an Any has `@type` beside its fields, a Duration is a text that ends in `s`.

use std::{collections::BTreeSet, net::IpAddr};

use serde::{Deserialize, Deserializer, de::Error as _};

/// `(validate.rules).string = {min_len: 1}`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Name(pub(crate) String);

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let empty = || D::Error::custom("an empty text");
        (!text.is_empty()).then_some(Self(text)).ok_or_else(empty)
    }
}

/// google.protobuf.Duration, in nanoseconds.
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

/// A oneof that is required.
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
    route_config: RouteConfiguration,
    http_filters: Vec<HttpFilter>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct HttpFilter {
    #[serde(rename = "name")]
    _name: Name,
    #[serde(rename = "typed_config")]
    _config: HttpFilterConfig,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "@type")]
enum HttpFilterConfig {
    #[serde(rename = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router")]
    Router(Nothing),
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
    route: RouteAction,
}

/// A oneof that is required.
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

/// Where a cluster's connections go, and from where.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Way {
    /// `None`: where they were going.
    pub(crate) to: Option<String>,
    pub(crate) from: Vec<IpAddr>,
}

impl Bootstrap {
    /// What Envoy checks besides the fields: names that are used exist, and nothing is there twice.
    pub(crate) fn faults(&self) -> Vec<String> {
        let StaticResources {
            listeners,
            clusters,
        } = &self.static_resources;
        let names: Vec<_> = clusters.iter().map(|it| &it.name).collect();
        let used = listeners.iter().flat_map(Listener::clusters);
        let unknown = used.filter(|name| !names.contains(name));
        let unknown = unknown.map(|name| format!("there is no cluster {name:?}"));
        let addresses = listeners.iter().flat_map(Listener::addresses);
        let twice = [
            once(names.iter()),
            once(listeners.iter().map(|it| &it.name)),
            once(addresses.chain([&self.admin.address])),
        ];
        let of_clusters = clusters.iter().filter_map(Cluster::fault);
        let all = unknown.chain(twice.into_iter().flatten());
        let all = all.chain(listeners.iter().flat_map(Listener::faults));
        all.chain(of_clusters).collect()
    }

    /// The way that a connection to an address takes, by the order in which Envoy looks for a chain: the port first, and
    /// no other chain where one has it; then the address.
    pub(crate) fn way(&self, listener: &str, to: IpAddr, port: u16) -> Way {
        let StaticResources {
            listeners,
            clusters,
        } = &self.static_resources;
        let listener = listeners.iter().find(|it| it.name.0 == listener).unwrap();
        let of_port = |chain: &&FilterChain| chain.port() == Some(port);
        let of_family = |chain: &&FilterChain| chain.port().is_none() && chain.takes(to);
        let chains = || listener.filter_chains.iter();
        let chain = chains().find(of_port).or_else(|| chains().find(of_family));
        let chain = chain.or(listener.default_filter_chain.as_ref()).unwrap();
        let cluster = clusters
            .iter()
            .find(|it| Some(&it.name) == chain.cluster())
            .unwrap();
        cluster.way()
    }
}

fn once<T: std::fmt::Debug>(all: impl Iterator<Item = T>) -> Option<String> {
    let mut known = BTreeSet::new();
    let twice = all
        .map(|it| format!("{it:?}"))
        .find(|it| !known.insert(it.clone()));
    twice.map(|it| format!("twice: {it}"))
}

impl Listener {
    fn faults(&self) -> Vec<String> {
        let is_odd = self.chains().any(|chain| chain.filters.len() != 1);
        let is_odd = (is_odd || self.filter_chains.is_empty())
            .then(|| format!("{:?}: a chain does not end in one filter", self.name));
        let twice = [
            once(self.chains().filter_map(|it| it.name.as_ref())),
            once(self.filter_chains.iter().map(|it| &it.filter_chain_match)),
            once(self.listener_filters.iter().map(|it| &it.name)),
        ];
        is_odd
            .into_iter()
            .chain(twice.into_iter().flatten())
            .collect()
    }

    fn chains(&self) -> impl Iterator<Item = &FilterChain> {
        self.filter_chains.iter().chain(&self.default_filter_chain)
    }

    fn addresses(&self) -> impl Iterator<Item = &Address> {
        let more = self.additional_addresses.iter().map(|it| &it.address);
        [&self.address].into_iter().chain(more)
    }

    fn clusters(&self) -> impl Iterator<Item = &Name> {
        self.chains()
            .flat_map(|chain| &chain.filters)
            .flat_map(|filter| match &filter.typed_config {
                FilterConfig::TcpProxy(proxy) => vec![&proxy.cluster],
                FilterConfig::Http(manager) => {
                    assert!(!manager.http_filters.is_empty());
                    let hosts = manager.route_config.virtual_hosts.iter();
                    let hosts =
                        hosts.inspect(|host| assert!(!host.domains.is_empty(), "{:?}", host.name));
                    hosts
                        .flat_map(|host| &host.routes)
                        .map(|it| &it.route.cluster)
                        .collect()
                }
            })
    }
}

impl FilterChain {
    fn port(&self) -> Option<u16> {
        let port = self.filter_chain_match.as_ref()?.destination_port?;
        Some(port.get())
    }

    /// By family: the ranges that are used hold all of one.
    fn takes(&self, to: IpAddr) -> bool {
        let ranges = self
            .filter_chain_match
            .iter()
            .flat_map(|it| &it.prefix_ranges);
        let ranges = ranges.inspect(|it| assert_eq!(it.prefix_len, Some(0)));
        ranges
            .into_iter()
            .any(|it| it.address_prefix.is_ipv4() == to.is_ipv4())
    }

    fn cluster(&self) -> Option<&Name> {
        match &self.filters.first()?.typed_config {
            FilterConfig::TcpProxy(proxy) => Some(&proxy.cluster),
            FilterConfig::Http(_) => None,
        }
    }
}

impl Cluster {
    /// `connect_timeout` is more than nothing; who finds its own hosts chooses among them too, and has none by name.
    fn fault(&self) -> Option<String> {
        let is_dynamic = self.r#type == DiscoveryType::OriginalDst;
        let is_whole = is_dynamic == (self.lb_policy == Some(LbPolicy::ClusterProvided))
            && !(is_dynamic && self.load_assignment.is_some())
            && self.connect_timeout.0 > 0;
        (!is_whole).then(|| format!("cluster {:?}", self.name))
    }

    fn way(&self) -> Way {
        let hosts = self.load_assignment.iter().flat_map(|it| &it.endpoints);
        let mut hosts = hosts
            .flat_map(|it| &it.lb_endpoints)
            .map(|it| &it.endpoint.address);
        let to = match (self.r#type, hosts.next()) {
            (DiscoveryType::OriginalDst, _) => None,
            (DiscoveryType::Static, None) => Some("nowhere".to_owned()),
            (DiscoveryType::Static, Some(Address::Pipe(pipe))) => Some(pipe.path.0.clone()),
            (DiscoveryType::Static, Some(Address::SocketAddress(to))) => {
                Some(std::net::SocketAddr::new(to.address, to.port_value).to_string())
            }
        };
        let bind = self.upstream_bind_config.iter();
        let from = bind.flat_map(|bind| {
            let more = bind
                .extra_source_addresses
                .iter()
                .map(|it| it.address.address);
            [bind.source_address.address].into_iter().chain(more)
        });
        Way {
            to,
            from: from.collect(),
        }
    }
}
