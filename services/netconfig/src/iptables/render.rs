//! Renders rules as arguments of iptables; inverse of [`super::lift`].

use crate::{
    marks::Mark,
    rules::{Expr, Network, Rule, Transport},
};

/// Of FIN, SYN, RST and ACK, only SYN is set.
pub(super) const SYN_ONLY: [&str; 2] = ["FIN,SYN,RST,ACK", "SYN"];

/// Established and related, as `iptables-save` prints them.
pub(super) const KNOWN: &str = "RELATED,ESTABLISHED";

/// Renders without the chain, as `iptables-save` prints it.
pub(super) fn render(rule: &Rule) -> String {
    let (mut transport, mut parts) = (None, Vec::new());
    for expr in &rule.0 {
        if let Expr::Protocol(found) = expr {
            transport = Some(*found);
        }
        if is_in_transport_match(expr) {
            // Only once: introduces the match for ports and flags.
            parts.extend(transport.take().map(|found| format!("-m {}", name(found))));
        }
        parts.extend(render_expr(expr));
    }
    parts.join(" ")
}

/// Belongs into `-m tcp` or `-m udp`.
fn is_in_transport_match(expr: &Expr) -> bool {
    matches!(
        expr,
        Expr::SourcePort(_) | Expr::Port(_) | Expr::PortNot(_) | Expr::TcpSyn
    )
}

/// Returns `None` if implied by the table or iptables: family and counters.
fn render_expr(expr: &Expr) -> Option<String> {
    Some(match expr {
        Expr::Version(_) | Expr::Counter => return None,
        Expr::Source(network) => format!("-s {}", cidr(*network)),
        Expr::Destination(network) => format!("-d {}", cidr(*network)),
        Expr::DestinationNot(other) => format!("! -d {}", cidr(*other)),
        Expr::ArrivesBy(name) => format!("-i {name}"),
        Expr::LeavesBy(name) => format!("-o {name}"),
        Expr::NotLeavesBy(name) => format!("! -o {name}"),
        Expr::Protocol(transport) => format!("-p {}", name(*transport)),
        Expr::SourcePort(port) => format!("--sport {port}"),
        Expr::Port(port) => format!("--dport {port}"),
        Expr::PortNot(port) => format!("! --dport {port}"),
        Expr::TcpSyn => format!("--tcp-flags {}", SYN_ONLY.join(" ")),
        Expr::Marked(mark) => format!("-m mark --mark {mark}"),
        Expr::NotMarked(mark) => format!("-m mark ! --mark {mark}"),
        Expr::ConnectionMarked(mark) => format!("-m connmark --mark {mark}"),
        Expr::NewConnection => "-m conntrack --ctstate NEW".to_owned(),
        Expr::KnownConnection => format!("-m conntrack --ctstate {KNOWN}"),
        Expr::InvalidConnection => "-m conntrack --ctstate INVALID".to_owned(),
        Expr::FromUser(user) => format!("-m owner --uid-owner {user}"),
        Expr::FromGroup(group) => format!("-m owner --gid-owner {group}"),
        Expr::NotFromGroup(group) => format!("-m owner ! --gid-owner {group}"),
        Expr::Mark(mark) => format!("-j MARK --set-xmark {mark}"),
        Expr::MarkConnection(mark) => format!("-j CONNMARK --set-xmark {mark}"),
        Expr::Zone(zone) => format!("-j CT --zone {zone}"),
        // Not ACCEPT: foreign rules in the same built-in chain have to see the packet, as after an
        // nftables chain accepts it.
        Expr::Accept => "-j RETURN".to_owned(),
        Expr::Drop => "-j DROP".to_owned(),
        Expr::Redirect(port) => format!("-j REDIRECT --to-ports {port}"),
        Expr::Tproxy(_, port, mark) => tproxy(*port, *mark),
        // Only in the node's own rules; iptables rejects the text.
        Expr::DestinationIn(..)
        | Expr::FromAnySocket
        | Expr::FromCgroup { .. }
        | Expr::Labelled(_)
        | Expr::Label(_)
        | Expr::SourceNat(_) => format!("<{expr}>"),
        Expr::Unknown(words) => words.clone(),
    })
}

/// Without an address, iptables uses that of the receiving interface.
fn tproxy(port: u16, mark: Mark) -> String {
    format!("-j TPROXY --on-port {port} --tproxy-mark {mark}")
}

/// iptables prints the length of host networks, too.
fn cidr(network: Network) -> String {
    format!("{}/{}", network.address(), network.prefix_len())
}

pub(super) fn name(transport: Transport) -> &'static str {
    match transport {
        Transport::Tcp => "tcp",
        Transport::Udp => "udp",
    }
}
