use std::{net::IpAddr, num::NonZeroU16};

use inpod_proto::{Invalid, netconfig::v1};

use super::{
    inbound_capture_of, interfaces, ipv6_of, networks, parse_all, parse_text, parse_texts, ports,
    selection,
};
use crate::rules::{Loopback, Network, Owner, Selection, Sidecar};

/// The maximum number of entries, since each entry is at least one rule.
const MAX_ENTRIES: usize = 64;

const INBOUND_CAPTURE: &str = "redirection.sidecar.inbound_capture";
const IPV6: &str = "redirection.sidecar.ipv6";
const PROXY_UIDS: &str = "redirection.sidecar.proxy_uids";
const PROXY_GIDS: &str = "redirection.sidecar.proxy_gids";
const INBOUND_PORTS: &str = "redirection.sidecar.inbound_ports.ports";
const EXCLUDED_INBOUND_PORTS: &str = "redirection.sidecar.excluded_inbound_ports";
const OUTBOUND_NETWORKS: &str = "redirection.sidecar.outbound_networks.networks";
const EXCLUDED_OUTBOUND_NETWORKS: &str = "redirection.sidecar.excluded_outbound_networks";
const OUTBOUND_PORTS: &str = "redirection.sidecar.outbound_ports";
const EXCLUDED_OUTBOUND_PORTS: &str = "redirection.sidecar.excluded_outbound_ports";
const EXCLUDED_INTERFACES: &str = "redirection.sidecar.excluded_interfaces";
const VIRTUAL_INTERFACES: &str = "redirection.sidecar.reroute_virtual_interfaces";
const OWNER_GROUPS: &str = "redirection.sidecar.owner_groups.groups";
const EXCLUDED_OWNER_GROUPS: &str = "redirection.sidecar.excluded_owner_groups";
const DNS_SERVERS: &str = "redirection.sidecar.dns.servers";
const LOOPBACK: &str = "redirection.sidecar.loopback_network";

pub(super) fn sidecar(wanted: v1::SidecarRedirection) -> Result<Sidecar, Invalid> {
    let proxy_users = owners(PROXY_UIDS, &wanted.proxy_uids)?;
    if proxy_users.is_empty() {
        return Err(Invalid::new(
            PROXY_UIDS,
            format!("{PROXY_UIDS} is required"),
        ));
    }
    let owner_groups = wanted.owner_groups.map(|some| some.groups);
    let owner_groups = owner_groups.map(|some| owners(OWNER_GROUPS, &some));
    Ok(Sidecar {
        inbound_capture: inbound_capture_of(INBOUND_CAPTURE, wanted.inbound_capture)?,
        ipv6: ipv6_of(IPV6, wanted.ipv6)?,
        proxy_users,
        proxy_groups: owners(PROXY_GIDS, &wanted.proxy_gids)?,
        inbound_ports: inbound_ports(wanted.inbound_ports.unwrap_or_default())?,
        excluded_inbound_ports: ports(EXCLUDED_INBOUND_PORTS, &wanted.excluded_inbound_ports)?,
        outbound_networks: outbound_networks(wanted.outbound_networks.unwrap_or_default())?,
        excluded_outbound_networks: networks(
            EXCLUDED_OUTBOUND_NETWORKS,
            &wanted.excluded_outbound_networks,
        )?,
        outbound_ports: ports(OUTBOUND_PORTS, &wanted.outbound_ports)?,
        excluded_outbound_ports: ports(EXCLUDED_OUTBOUND_PORTS, &wanted.excluded_outbound_ports)?,
        excluded_interfaces: interfaces(EXCLUDED_INTERFACES, &wanted.excluded_interfaces)?,
        virtual_interfaces: interfaces(VIRTUAL_INTERFACES, &wanted.reroute_virtual_interfaces)?,
        owner_groups: owner_groups.transpose()?,
        excluded_owner_groups: owners(EXCLUDED_OWNER_GROUPS, &wanted.excluded_owner_groups)?,
        dns: servers(wanted.dns.unwrap_or_default())?,
        drop_invalid: wanted.drop_invalid,
        loopback: loopback(&wanted.loopback_network)?,
        keep_existing_connections: false,
    })
}

fn inbound_ports(wanted: v1::PortSelection) -> Result<Selection<NonZeroU16>, Invalid> {
    let v1::PortSelection { all, ports } = wanted;
    let these = super::ports(INBOUND_PORTS, &ports)?;
    selection(INBOUND_PORTS, all, these)
}

fn outbound_networks(wanted: v1::NetworkSelection) -> Result<Selection<Network>, Invalid> {
    let v1::NetworkSelection { all, networks } = wanted;
    let these = super::networks(OUTBOUND_NETWORKS, &networks)?;
    selection(OUTBOUND_NETWORKS, all, these)
}

fn servers(wanted: v1::DnsSelection) -> Result<Selection<IpAddr>, Invalid> {
    let v1::DnsSelection { all, servers } = wanted;
    let these = parse_texts(DNS_SERVERS, MAX_ENTRIES, &servers)?;
    selection(DNS_SERVERS, all, these)
}

fn owners(field: &'static str, numbers: &[u32]) -> Result<Vec<Owner>, Invalid> {
    parse_all(field, MAX_ENTRIES, numbers, |number| {
        Owner::new(*number).ok_or_else(|| format!("{number} is not a user or group id"))
    })
}

fn loopback(text: &str) -> Result<Loopback, Invalid> {
    if text.is_empty() {
        return Ok(Loopback::default());
    }
    parse_text(text).map_err(|why| Invalid::new(LOOPBACK, format!("{LOOPBACK}: {why}")))
}

#[cfg(test)]
mod tests;
