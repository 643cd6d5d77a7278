//! Builds the rules by which only ztunnel answers on ztunnel's ports. Otherwise, any listener on a port would receive
//! the redirected connections, for example a container of the pod while ztunnel restarts.
//!
//! ztunnel's listeners carry ztunnel's mark (services/docs/facts/ztunnel.md, 8), which takes a capability. The rules
//! see only the packets that open a connection, so that no established connection depends on them.

use super::{MANGLE_PRIORITY, base, either_family};
use crate::{
    marks::{FROM_ZTUNNEL, ZTUNNEL_DNS_PORT, ZTUNNEL_PORTS},
    rules::{Ambient, Chain, Expr, Hook, Kind, Rule, Transport},
};

/// Refuses connections and queries to a listener without the mark.
pub(super) fn requests(settings: &Ambient) -> Chain {
    let refuse = |transport, port| {
        let mut packets = vec![Expr::Protocol(transport), Expr::Port(port)];
        packets.extend((transport == Transport::Tcp).then_some(Expr::TcpSyn));
        packets.push(Expr::ReceiverNotMarked(FROM_ZTUNNEL));
        either_family(settings, packets, Expr::Refuse(transport))
    };
    let connections = tcp_ports(settings).map(|port| refuse(Transport::Tcp, port));
    let queries = settings.dns_capture;
    let queries = queries.then(|| refuse(Transport::Udp, ZTUNNEL_DNS_PORT));
    Chain {
        name: "input".to_owned(),
        base: Some(base(Kind::Filter, Hook::Input, MANGLE_PRIORITY)),
        rules: connections.chain(queries).collect(),
    }
}

/// Drops SYN-ACKs of a listener without the mark. The rules on requests may see another listener than the kernel
/// chooses later, or none: if a program chooses at random, or if the addresses linger in TIME_WAIT
/// (services/docs/facts/kernel.md, 23).
pub(super) fn acceptances(settings: &Ambient) -> Vec<Rule> {
    let drop = |port| {
        let packets = vec![
            Expr::Protocol(Transport::Tcp),
            Expr::SourcePort(port),
            Expr::TcpSynAck,
            Expr::NotMarked(FROM_ZTUNNEL),
        ];
        either_family(settings, packets, Expr::Drop)
    };
    tcp_ports(settings).map(drop).collect()
}

fn tcp_ports(settings: &Ambient) -> impl Iterator<Item = u16> {
    let dns = settings.dns_capture.then_some(ZTUNNEL_DNS_PORT);
    ZTUNNEL_PORTS.into_iter().chain(dns)
}
