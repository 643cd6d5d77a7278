//! Renders rules as text for `nft -f`, golden files, previews and logs.

use std::fmt;

use super::{Base, Chain, Expr, Hook, Kind, Network, Policy, Rule, Ruleset, Table, Transport};
use crate::{family::Family, marks::Mark};

impl fmt::Display for Ruleset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.tables.iter().try_for_each(|table| table.fmt(f))
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "table {} {} {{", self.family, self.name)?;
        self.chains.iter().try_for_each(|chain| chain.fmt(f))?;
        writeln!(f, "}}")
    }
}

impl fmt::Display for Chain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\tchain {} {{", self.name)?;
        if let Some(base) = &self.base {
            writeln!(f, "\t\t{base}")?;
        }
        for rule in &self.rules {
            writeln!(f, "\t\t{rule}")?;
        }
        writeln!(f, "\t}}")
    }
}

impl fmt::Display for Base {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            kind,
            hook,
            priority,
            policy,
        } = self;
        write!(
            f,
            "type {kind} hook {hook} priority {priority}; policy {policy};"
        )
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Filter => "filter",
            Self::Nat => "nat",
            Self::Route => "route",
        })
    }
}

impl fmt::Display for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Prerouting => "prerouting",
            Self::Input => "input",
            Self::Forward => "forward",
            Self::Output => "output",
            Self::Postrouting => "postrouting",
        })
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Accept => "accept",
            Self::Drop => "drop",
        })
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, expr) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str(" ")?;
            }
            expr.fmt(f)?;
        }
        Ok(())
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        })
    }
}

impl fmt::Display for Expr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version(Family::V4) => write!(f, "meta nfproto ipv4"),
            Self::Version(Family::V6) => write!(f, "meta nfproto ipv6"),
            Self::Source(network) => address(f, *network, "saddr"),
            Self::Destination(network) => address(f, *network, "daddr"),
            Self::DestinationNot(other) => address(f, *other, "daddr !="),
            Self::DestinationIn(family, set) => write!(f, "{} daddr @{set}", header(*family)),
            Self::FrameFrom(address) => {
                let header = header(Family::of(*address));
                write!(f, "meta protocol {header} {header} saddr {address}")
            }
            Self::FrameTagged(tag) => {
                write!(f, "@nh,0,16 & 0x0fff == 0 meta protocol {tag:#06x}")
            }
            Self::ArrivesBy(name) => write!(f, "iifname \"{name}\""),
            Self::LeavesBy(name) => write!(f, "oifname \"{name}\""),
            Self::NotLeavesBy(name) => write!(f, "oifname != \"{name}\""),
            Self::Protocol(transport) => write!(f, "meta l4proto {transport}"),
            Self::SourcePort(port) => write!(f, "th sport {port}"),
            Self::Port(port) => write!(f, "th dport {port}"),
            Self::PortNot(port) => write!(f, "th dport != {port}"),
            Self::TcpSyn => write!(f, "tcp flags & (fin|syn|rst|ack) == syn"),
            Self::Marked(mark) => masked(f, "meta mark", *mark, "=="),
            Self::NotMarked(mark) => masked(f, "meta mark", *mark, "!="),
            Self::ConnectionMarked(mark) => masked(f, "ct mark", *mark, "=="),
            Self::ReceiverNotMarked(mark) => masked(f, "socket mark", *mark, "!="),
            Self::NewConnection => write!(f, "ct state new"),
            Self::KnownConnection => write!(f, "ct state established,related"),
            Self::InvalidConnection => write!(f, "ct state invalid"),
            Self::FromAnySocket => write!(f, "meta skuid != {}", u32::MAX),
            Self::FromUser(user) => write!(f, "meta skuid {user}"),
            Self::FromGroup(group) => write!(f, "meta skgid {group}"),
            Self::NotFromGroup(group) => write!(f, "meta skgid != {group}"),
            Self::Counter => write!(f, "counter"),
            Self::Mark(mark) => set(f, "meta mark", *mark),
            Self::MarkConnection(mark) => set(f, "ct mark", *mark),
            Self::Zone(zone) => write!(f, "ct zone set {zone}"),
            Self::Accept => write!(f, "accept"),
            Self::Drop => write!(f, "drop"),
            Self::Refuse(Transport::Tcp) => write!(f, "reject with tcp reset"),
            Self::Refuse(Transport::Udp) => write!(f, "reject with icmpx port-unreachable"),
            Self::Redirect(port) => write!(f, "redirect to :{port}"),
            Self::SourceNat(to) => write!(f, "snat {} to {to}", header(Family::of(*to))),
            Self::Tproxy(family, port, mark) => {
                let family = match family {
                    None => "",
                    Some(Family::V4) => " ip",
                    Some(Family::V6) => " ip6",
                };
                write!(f, "tproxy{family} to :{port} ")?;
                set(f, "meta mark", *mark)?;
                write!(f, " accept")
            }
            Self::Unknown(what) => write!(f, "<{what}>"),
        }
    }
}

fn address(f: &mut fmt::Formatter<'_>, network: Network, field: &str) -> fmt::Result {
    write!(f, "{} {field} ", header(Family::of_network(network)))?;
    // nft prints a single address without a length.
    if network.is_host() {
        write!(f, "{}", network.address())
    } else {
        write!(f, "{network}")
    }
}

fn header(family: Family) -> &'static str {
    match family {
        Family::V4 => "ip",
        Family::V6 => "ip6",
    }
}

fn masked(f: &mut fmt::Formatter<'_>, what: &str, mark: Mark, relation: &str) -> fmt::Result {
    let (mask, value) = (mark.mask(), mark.value());
    write!(f, "{what} & {mask:#x} {relation} {value:#x}")
}

fn set(f: &mut fmt::Formatter<'_>, what: &str, mark: Mark) -> fmt::Result {
    let (kept, value) = (!mark.mask(), mark.value());
    write!(f, "{what} set {what} & {kept:#x} | {value:#x}")
}
