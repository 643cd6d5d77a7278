//! The part of Envoy that the injector's bootstrap needs: a connection's route to `virtualInbound`. Fields are those
//! of Envoy's API v3; all else is ignored.

use std::{
    fs,
    net::{IpAddr, SocketAddr},
    path::Path,
};

use anyhow::{Context as _, bail};
use serde_json::Value;
use socket2::SockAddr;

use crate::Way;

/// The inbound listener, and all clusters.
#[derive(Debug)]
pub(crate) struct Bootstrap {
    inbound: Value,
    clusters: Vec<Value>,
}

impl Bootstrap {
    pub(crate) fn read(path: &Path) -> anyhow::Result<Self> {
        let document: Value = serde_json::from_slice(&fs::read(path)?)?;
        let all = |list: &str| {
            let found = document.pointer(&format!("/static_resources/{list}"));
            let found = found.and_then(Value::as_array).cloned();
            found.with_context(|| format!("it has no {list}"))
        };
        let mut listeners = all("listeners")?.into_iter();
        let inbound = listeners.find(|it| text(it, "/name") == Some("virtualInbound"));
        Ok(Self {
            inbound: inbound.context("it has no virtualInbound")?,
            clusters: all("clusters")?,
        })
    }

    /// Transparent sockets accept traffic addressed to others.
    pub(crate) fn is_transparent(&self) -> bool {
        self.inbound.get("transparent") == Some(&Value::Bool(true))
    }

    fn mark(&self) -> Option<u32> {
        let filters = list(&self.inbound, "/listener_filters");
        let mut marks = filters
            .iter()
            .filter_map(|it| it.pointer("/typed_config/mark"));
        u32::try_from(marks.next()?.as_u64()?).ok()
    }

    pub(crate) fn way(&self, client: SocketAddr, original: SocketAddr) -> anyhow::Result<Way> {
        let cluster = self.cluster(original)?;
        let to = match list(cluster, "/load_assignment/endpoints/0/lb_endpoints") {
            _ if text(cluster, "/type") == Some("ORIGINAL_DST") => original.into(),
            [only] => address(only.pointer("/endpoint/address").unwrap_or(&Value::Null))?,
            _ => bail!("it leads nowhere"),
        };
        let mark = self.mark();
        let from = match mark {
            Some(_) => Some(client.ip()),
            None => source(cluster, to.as_socket())?,
        };
        Ok(Way { to, from, mark })
    }

    /// Selects by the port's filter chain, else by the address family's.
    fn cluster(&self, to: SocketAddr) -> anyhow::Result<&Value> {
        let wanted = |chain: &Value, field: &str| {
            chain
                .pointer(&format!("/filter_chain_match/{field}"))
                .cloned()
        };
        let of_port = |it: &&Value| wanted(it, "destination_port") == Some(to.port().into());
        let any = if to.is_ipv4() { "0.0.0.0" } else { "::" };
        let of_family =
            |it: &&Value| wanted(it, "prefix_ranges/0/address_prefix") == Some(any.into());
        let chains = || list(&self.inbound, "/filter_chains").iter();
        let chain = chains().find(of_port).or_else(|| chains().find(of_family));
        let name = chain.and_then(|it| text(it, "/filters/0/typed_config/cluster"));
        let mut clusters = self.clusters.iter();
        let cluster = clusters.find(|it| text(it, "/name") == name);
        cluster.context("no chain takes it")
    }
}

/// Returns, of several addresses, the one of the destination's family.
fn source(cluster: &Value, to: Option<SocketAddr>) -> anyhow::Result<Option<IpAddr>> {
    let first = cluster.pointer("/upstream_bind_config/source_address");
    let more = list(cluster, "/upstream_bind_config/extra_source_addresses");
    let more = more.iter().filter_map(|it| it.get("address"));
    let all = first
        .into_iter()
        .chain(more)
        .filter_map(|it| text(it, "/address"));
    let all = all.map(str::parse).collect::<Result<Vec<IpAddr>, _>>()?;
    let is_of_family = |it: &IpAddr| to.is_some_and(|to| to.is_ipv4() == it.is_ipv4());
    Ok(all.into_iter().find(is_of_family))
}

fn address(of: &Value) -> anyhow::Result<SockAddr> {
    if let Some(path) = text(of, "/pipe/path") {
        return Ok(SockAddr::unix(path)?);
    }
    let ip: IpAddr = text(of, "/socket_address/address")
        .context("no address")?
        .parse()?;
    let port = of
        .pointer("/socket_address/port_value")
        .and_then(Value::as_u64);
    let port = u16::try_from(port.context("no port")?)?;
    Ok(SocketAddr::new(ip, port).into())
}

fn text<'a>(value: &'a Value, pointer: &str) -> Option<&'a str> {
    value.pointer(pointer).and_then(Value::as_str)
}

fn list<'a>(value: &'a Value, pointer: &str) -> &'a [Value] {
    let items = value.pointer(pointer).and_then(Value::as_array);
    items.map_or(&[], Vec::as_slice)
}
