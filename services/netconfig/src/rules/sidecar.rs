//! Describes a sidecar's redirection: the rules of `istio-iptables` (services/docs/facts/istio-sidecar.md, 4.3 and
//! 4.4) in base chains of inpod's tables. Comments at the rules note differences from Istio.

mod inbound;
mod outbound;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::{
    Expr, InterfaceName, Kind, Network, Owner, Rule, Ruleset, Selection, Sidecar, Table, Transport,
    ambient::{MANGLE, MANGLE_PRIORITY, NAT, NAT_PRIORITY, RAW, RAW_PRIORITY, base, table},
};
use crate::{
    family::Family,
    marks::{APPLICATION_DNS_ZONE, DNS_PORT, PROXY_DNS_ZONE, ZTUNNEL_DNS_PORT},
};

const TCP: Expr = Expr::Protocol(Transport::Tcp);
const UDP: Expr = Expr::Protocol(Transport::Udp);

/// Source addresses of a proxy's calls to the application (Istio's inbound passthrough), by which rules recognise
/// connections through the proxy. 127.0.0.0/8 is local; the IPv6 address has to be added to `lo`
/// (services/docs/facts/istio-sidecar.md, 4.4.7).
pub(crate) const PASSTHROUGH_V6: Ipv6Addr = Ipv6Addr::new(0, 0, 0, 0, 0, 0, 0, 6);
const PASSTHROUGH_V4: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 6);

/// Builds the rules, and omits tables without rules, except nat.
pub(crate) fn ruleset(settings: &Sidecar) -> Ruleset {
    let mut tables = Vec::new();
    tables.extend(raw(settings));
    tables.extend(mangle(settings));
    tables.push(nat(settings));
    Ruleset { tables }
}

/// Separates DNS queries to servers from DNS queries to the proxy by conntrack zones, since both may come from the
/// same port. Queries to servers by others than the proxy are in the proxy's zone, like all answers of servers;
/// Istio puts such queries into the other zone, where their answers do not match. The first zone set for a packet
/// counts (nft_ct_set_zone_eval in net/netfilter/nft_ct.c, xt_ct_target in net/netfilter/xt_CT.c). Families without
/// captured servers have no such rules; Istio writes the proxy's rules for these families, too.
fn raw(settings: &Sidecar) -> Option<Table> {
    let families = dns_families(settings);
    if families.is_empty() {
        return None;
    }
    let zone = |packets, zone| rule(&families, packets, Expr::Zone(zone));
    let answers = servers(settings, &families, Expr::Source).map(|from| {
        let packets = from.into_iter().chain([UDP, Expr::SourcePort(DNS_PORT)]);
        zone(packets.collect(), PROXY_DNS_ZONE)
    });
    let asked = |conditions: Vec<Expr>| {
        let packets = [UDP, Expr::Port(DNS_PORT)].into_iter().chain(conditions);
        zone(packets.collect(), PROXY_DNS_ZONE)
    };
    let interfaces = settings.excluded_interfaces.iter().cloned();
    let by_interfaces = interfaces.map(|name| {
        let packets = vec![Expr::LeavesBy(name), UDP, Expr::Port(DNS_PORT)];
        zone(packets, PROXY_DNS_ZONE)
    });
    let of_proxy = proxies(settings).flat_map(|proxy| {
        let answers = vec![UDP, Expr::SourcePort(ZTUNNEL_DNS_PORT), proxy.clone()];
        [asked(vec![proxy]), zone(answers, APPLICATION_DNS_ZONE)]
    });
    let of_groups = bypassed_groups(settings).into_iter().map(asked);
    let of_application = servers(settings, &families, Expr::Destination).map(|to| {
        let packets = to.into_iter().chain([UDP, Expr::Port(DNS_PORT)]);
        zone(packets.collect(), APPLICATION_DNS_ZONE)
    });
    let base = |hook| base(Kind::Filter, hook, RAW_PRIORITY);
    let direct = by_interfaces.chain(of_proxy).chain(of_groups);
    let sent = direct.chain(of_application).collect();
    Some(table(RAW, base, base, answers.collect(), sent))
}

fn mangle(settings: &Sidecar) -> Option<Table> {
    let mut prerouting = Vec::new();
    if settings.drop_invalid {
        // The rule drops packets of every protocol; Istio's nftables rules drop only TCP.
        let packets = vec![Expr::InvalidConnection];
        prerouting.push(rule(Family::captured(settings.ipv6), packets, Expr::Drop));
    }
    let mut output = Vec::new();
    if settings.captures_by_tproxy() {
        prerouting.extend(inbound::by_tproxy(settings));
        output = inbound::back_to_proxy(settings);
    }
    let is_empty = prerouting.is_empty() && output.is_empty();
    (!is_empty).then(|| {
        table(
            MANGLE,
            |hook| base(Kind::Filter, hook, MANGLE_PRIORITY),
            // The output chain is a route chain, so that its mark affects routing.
            |hook| base(Kind::Route, hook, MANGLE_PRIORITY),
            prerouting,
            output,
        )
    })
}

fn nat(settings: &Sidecar) -> Table {
    let base = |hook| base(Kind::Nat, hook, NAT_PRIORITY);
    let (arriving, sent) = (inbound::by_redirect(settings), outbound::capture(settings));
    table(NAT, base, base, arriving, sent)
}

fn proxies(settings: &Sidecar) -> impl Iterator<Item = Expr> {
    let users = settings.proxy_users.iter();
    let users = users.map(|user| Expr::FromUser(user.number()));
    users.chain(proxy_groups(settings))
}

fn proxy_groups(settings: &Sidecar) -> impl Iterator<Item = Expr> {
    let groups = settings.proxy_groups.iter();
    groups.map(|group| Expr::FromGroup(group.number()))
}

/// Returns conditions for the groups, other than the proxy's, whose traffic is not captured. If only some groups
/// are captured, a single list of conditions excludes all other groups.
fn bypassed_groups(settings: &Sidecar) -> Vec<Vec<Expr>> {
    let excluded = settings.excluded_owner_groups.iter();
    let excluded = excluded.map(|group| vec![Expr::FromGroup(group.number())]);
    let others = |included: &Vec<Owner>| -> Vec<Expr> {
        let included = included.iter();
        let other = included.map(|group| Expr::NotFromGroup(group.number()));
        other.collect()
    };
    let others = settings.owner_groups.iter().map(others);
    excluded.chain(others).collect()
}

/// Returns conditions for the captured servers, with `None` for all servers.
fn servers(
    settings: &Sidecar,
    families: &[Family],
    condition: fn(Network) -> Expr,
) -> impl Iterator<Item = Option<Expr>> + use<> {
    let conditions: Vec<_> = match &settings.dns {
        Selection::All => vec![None],
        Selection::These(servers) => {
            let is_captured = |server: &&IpAddr| families.contains(&Family::of(**server));
            let servers = servers.iter().filter(is_captured);
            let condition = |server: &IpAddr| Some(condition(Network::host(*server)));
            servers.map(condition).collect()
        }
    };
    conditions.into_iter()
}

/// Builds a rule, and adds the family if only one family is captured and no condition implies the family.
fn rule(families: &[Family], packets: Vec<Expr>, action: Expr) -> Rule {
    let has_family = packets.iter().any(|packet| packet.family().is_some());
    let only = match families {
        [only] if !has_family => Some(Expr::Version(*only)),
        _ => None,
    };
    let counted = [Expr::Counter, action];
    Rule(only.into_iter().chain(packets).chain(counted).collect())
}

/// Returns the families whose DNS queries go to the proxy, and none if port 53 is excluded.
fn dns_families(settings: &Sidecar) -> Vec<Family> {
    let mut excluded = settings.excluded_outbound_ports.iter();
    if !settings.captures_any_group() || excluded.any(|port| port.get() == DNS_PORT) {
        return Vec::new();
    }
    let is_asked = |family: &Family| settings.dns.is_any(|server| Family::of(*server) == *family);
    let families = Family::captured(settings.ipv6).iter();
    families.copied().filter(is_asked).collect()
}

/// Returns whether any outbound traffic is captured, apart from the proxy's calls to the pod.
fn captures_outbound(settings: &Sidecar) -> bool {
    let is_any = settings.outbound_networks.is_any(|_| true)
        || !settings.outbound_ports.is_empty()
        || !dns_families(settings).is_empty();
    settings.captures_any_group() && is_any
}

fn not_loopback(settings: &Sidecar) -> impl Iterator<Item = Expr> {
    let families = Family::captured(settings.ipv6).iter();
    families.map(|family| Expr::DestinationNot(loopback(settings, *family)))
}

fn loopback(settings: &Sidecar, family: Family) -> Network {
    match family {
        Family::V4 => settings.loopback.network(),
        Family::V6 => Network::host(Ipv6Addr::LOCALHOST.into()),
    }
}

/// Returns a condition for the proxy's passthrough address, per captured family.
fn from_passthrough(settings: &Sidecar) -> impl Iterator<Item = Expr> {
    let families = Family::captured(settings.ipv6).iter();
    let address = |family: &Family| match family {
        Family::V4 => PASSTHROUGH_V4.into(),
        Family::V6 => PASSTHROUGH_V6.into(),
    };
    families.map(move |family| Expr::Source(Network::host(address(family))))
}

fn by_excluded_interfaces(
    settings: &Sidecar,
    direction: fn(InterfaceName) -> Expr,
) -> impl Iterator<Item = Rule> {
    let interfaces = settings.excluded_interfaces.iter().cloned();
    let families = Family::captured(settings.ipv6);
    interfaces.map(move |name| rule(families, vec![direction(name)], Expr::Accept))
}

fn only_syn(settings: &Sidecar) -> Option<Expr> {
    settings.keep_existing_connections.then_some(Expr::TcpSyn)
}

#[cfg(test)]
mod tests;
