//! Builds the rules by which only ztunnel answers on ztunnel's ports. Otherwise, any listener on a port would receive
//! the redirected connections, for example a container of the pod while ztunnel restarts.
//!
//! ztunnel's listeners carry ztunnel's mark (services/docs/facts/ztunnel.md, 8), which takes a capability. The rules
//! see only the packets that open a connection, so that no established connection depends on them.

use super::{MANGLE_PRIORITY, base, only_family};
use crate::{
    marks::{FROM_ZTUNNEL, OUTBOUND_PORT, ZTUNNEL_DNS_PORT, ZTUNNEL_PORTS},
    rules::{Ambient, Chain, Expr, Hook, Kind, Rule, Transport},
};

/// Refuses connections and queries to a listener without the mark, and connections of ztunnel to its own outbound
/// listener. The rules count nothing, because each counter makes an ADD slower.
pub(super) fn input(settings: &Ambient) -> Chain {
    let refuse = |transport, port, condition| {
        let version = only_family(settings).map(Expr::Version);
        let mut exprs: Vec<_> = version.into_iter().collect();
        exprs.extend([Expr::Protocol(transport), Expr::Port(port)]);
        exprs.extend((transport == Transport::Tcp).then_some(Expr::TcpSyn));
        exprs.extend([condition, Expr::Refuse(transport)]);
        Rule(exprs)
    };
    let unmarked = || Expr::ReceiverNotMarked(FROM_ZTUNNEL);
    let connections = tcp_ports(settings).map(|port| refuse(Transport::Tcp, port, unmarked()));
    let queries = settings.dns_capture;
    let queries = queries.then(|| refuse(Transport::Udp, ZTUNNEL_DNS_PORT, unmarked()));
    // After a connection of the pod to its own address on this port, which nothing redirects, stock ztunnel would call
    // itself until no descriptor is left for the node's other pods (services/docs/facts/ztunnel.md, 10).
    let loops = refuse(Transport::Tcp, OUTBOUND_PORT, Expr::Marked(FROM_ZTUNNEL));
    Chain {
        name: "input".to_owned(),
        base: Some(base(Kind::Filter, Hook::Input, MANGLE_PRIORITY)),
        rules: connections.chain(queries).chain([loops]).collect(),
    }
}

fn tcp_ports(settings: &Ambient) -> impl Iterator<Item = u16> {
    let dns = settings.dns_capture.then_some(ZTUNNEL_DNS_PORT);
    ZTUNNEL_PORTS.into_iter().chain(dns)
}
