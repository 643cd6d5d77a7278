//! Envoy's checks across fields, and a connection's route.

use std::{collections::BTreeSet, net::IpAddr};

use super::{
    Address, Bootstrap, Cluster, DiscoveryType, FilterChain, FilterConfig, HttpConnectionManager,
    HttpFault, HttpFilterConfig, LbPolicy, Listener, Name, Route, StaticResources,
};

/// A connection's destination and source.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Way {
    /// `None`: the original destination.
    pub(crate) to: Option<String>,
    pub(crate) from: Vec<IpAddr>,
}

impl Bootstrap {
    /// Checks for existing and unique names.
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

    /// Finds the chain by Envoy's matching order: first the port, excluding other chains if one
    /// matches; then the address.
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
        let of_http = self.managers().flat_map(HttpConnectionManager::faults);
        is_odd
            .into_iter()
            .chain(twice.into_iter().flatten())
            .chain(of_http)
            .collect()
    }

    fn managers(&self) -> impl Iterator<Item = &HttpConnectionManager> {
        let filters = self.chains().flat_map(|chain| &chain.filters);
        filters.filter_map(|filter| match &filter.typed_config {
            FilterConfig::Http(manager) => Some(manager),
            FilterConfig::TcpProxy(_) => None,
        })
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
                        .filter_map(|it| Some(&it.route.as_ref()?.cluster))
                        .collect()
                }
            })
    }
}

impl HttpConnectionManager {
    /// Requires the router last, and only existing filters in routes.
    fn faults(&self) -> Vec<String> {
        let filters: Vec<_> = self
            .http_filters
            .iter()
            .map(|it| &it.typed_config)
            .collect();
        let ends = matches!(filters.last(), Some(HttpFilterConfig::Router(_)));
        let delays = filters
            .iter()
            .any(|it| matches!(it, HttpFilterConfig::Fault(_)));
        let hosts = self.route_config.virtual_hosts.iter();
        let routes: Vec<_> = hosts.flat_map(|host| &host.routes).collect();
        let is_odd = !ends || routes.iter().any(|it| it.fault().is_some() && !delays);
        let odd = is_odd.then(|| "its filters are not those of its routes".to_owned());
        let of_routes = routes.into_iter().filter_map(Route::odd);
        odd.into_iter().chain(of_routes).collect()
    }
}

impl Route {
    fn fault(&self) -> Option<&HttpFault> {
        match self.typed_per_filter_config.as_ref()?.fault.as_ref()? {
            HttpFilterConfig::Fault(fault) => Some(fault),
            HttpFilterConfig::Router(_) => None,
        }
    }

    fn odd(&self) -> Option<String> {
        let answers = self.direct_response.as_ref();
        let status = answers.is_none_or(|it| (200..600).contains(&it.status));
        let delay = self.fault().and_then(|it| it.delay.as_ref());
        let is_late = delay.is_none_or(|it| it.fixed_delay.0 > 0);
        let one = self.route.is_some() != answers.is_some();
        (!(one && status && is_late)).then(|| "a route is not what it should be".to_owned())
    }
}

impl FilterChain {
    fn port(&self) -> Option<u16> {
        let port = self.filter_chain_match.as_ref()?.destination_port?;
        Some(port.get())
    }

    /// Each family's ranges must cover all of it.
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
    /// Requires a positive `connect_timeout`, and no hosts for original destinations.
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
