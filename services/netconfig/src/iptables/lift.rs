//! Turns iptables' arguments into rules; inverse of [`super::render`].

use std::str::FromStr;

use super::{
    render::{KNOWN, SYN_ONLY, name},
    tokens::join,
};
use crate::{
    marks::Mark,
    rules::{Expr, InterfaceName, Rule, Transport},
};

/// Begin the next condition or the action.
const BEGINNINGS: [&str; 3] = ["-m", "-j", "-g"];

/// Turns anything that inpod does not write into [`Expr::Unknown`], so that rendering yields the same rule again.
pub(super) fn lift(tokens: &[String]) -> Rule {
    let tokens: Vec<_> = tokens.iter().map(String::as_str).collect();
    let (mut rest, mut exprs) = (tokens.as_slice(), Vec::new());
    while !rest.is_empty() {
        let transport = exprs.iter().find_map(transport_of);
        let (found, after) = next(rest, transport).unwrap_or_else(|| unknown(rest));
        exprs.extend(found);
        rest = after;
    }
    Rule(exprs)
}

fn transport_of(expr: &Expr) -> Option<Transport> {
    if let Expr::Protocol(transport) = expr {
        Some(*transport)
    } else {
        None
    }
}

/// Expression found, if any, and remaining arguments.
type Lifted<'a, 'w> = Option<(Option<Expr>, &'a [&'w str])>;

fn next<'a, 'w>(tokens: &'a [&'w str], transport: Option<Transport>) -> Lifted<'a, 'w> {
    if let ["-m", named, rest @ ..] = tokens
        && transport.map(name) == Some(*named)
    {
        // Only introduces the arguments that follow.
        return Some((None, rest));
    }
    let lifted = header(tokens)
        .or_else(|| in_transport(tokens, transport?))
        .or_else(|| condition(tokens))
        .or_else(|| action(tokens));
    lifted.map(|(expr, rest)| (Some(expr), rest))
}

type Found<'a, 'w> = Option<(Expr, &'a [&'w str])>;

fn header<'a, 'w>(tokens: &'a [&'w str]) -> Found<'a, 'w> {
    Some(match tokens {
        ["-s", network, rest @ ..] => (Expr::Source(parse(network)?), rest),
        ["-d", network, rest @ ..] => (Expr::Destination(parse(network)?), rest),
        ["!", "-d", network, rest @ ..] => (Expr::DestinationNot(parse(network)?), rest),
        ["-i", name, rest @ ..] => (Expr::ArrivesBy(interface(name)?), rest),
        ["-o", name, rest @ ..] => (Expr::LeavesBy(interface(name)?), rest),
        ["!", "-o", name, rest @ ..] => (Expr::NotLeavesBy(interface(name)?), rest),
        ["-p", "tcp", rest @ ..] => (Expr::Protocol(Transport::Tcp), rest),
        ["-p", "udp", rest @ ..] => (Expr::Protocol(Transport::Udp), rest),
        _ => return None,
    })
}

fn in_transport<'a, 'w>(tokens: &'a [&'w str], transport: Transport) -> Found<'a, 'w> {
    Some(match tokens {
        ["--sport", port, rest @ ..] => (Expr::SourcePort(parse(port)?), rest),
        ["--dport", port, rest @ ..] => (Expr::Port(parse(port)?), rest),
        ["!", "--dport", port, rest @ ..] => (Expr::PortNot(parse(port)?), rest),
        ["--tcp-flags", of, set, rest @ ..]
            if [*of, *set] == SYN_ONLY && transport == Transport::Tcp =>
        {
            (Expr::TcpSyn, rest)
        }
        _ => return None,
    })
}

fn condition<'a, 'w>(tokens: &'a [&'w str]) -> Found<'a, 'w> {
    Some(match tokens {
        ["-m", "mark", "--mark", marked, rest @ ..] => (Expr::Marked(mark(marked)?), rest),
        ["-m", "mark", "!", "--mark", marked, rest @ ..] => (Expr::NotMarked(mark(marked)?), rest),
        ["-m", "connmark", "--mark", marked, rest @ ..] => {
            (Expr::ConnectionMarked(mark(marked)?), rest)
        }
        ["-m", "conntrack", "--ctstate", "NEW", rest @ ..] => (Expr::NewConnection, rest),
        ["-m", "conntrack", "--ctstate", known, rest @ ..] if *known == KNOWN => {
            (Expr::KnownConnection, rest)
        }
        ["-m", "conntrack", "--ctstate", "INVALID", rest @ ..] => (Expr::InvalidConnection, rest),
        ["-m", "owner", "--uid-owner", user, rest @ ..] => (Expr::FromUser(parse(user)?), rest),
        ["-m", "owner", "--gid-owner", group, rest @ ..] => (Expr::FromGroup(parse(group)?), rest),
        ["-m", "owner", "!", "--gid-owner", group, rest @ ..] => {
            (Expr::NotFromGroup(parse(group)?), rest)
        }
        _ => return None,
    })
}

fn action<'a, 'w>(tokens: &'a [&'w str]) -> Found<'a, 'w> {
    Some(match tokens {
        ["-j", "MARK", "--set-xmark", marked, rest @ ..] => (Expr::Mark(mark(marked)?), rest),
        ["-j", "CONNMARK", "--set-xmark", marked, rest @ ..] => {
            (Expr::MarkConnection(mark(marked)?), rest)
        }
        ["-j", "CT", "--zone", zone, rest @ ..] => (Expr::Zone(parse(zone)?), rest),
        ["-j", "RETURN", rest @ ..] => (Expr::Accept, rest),
        ["-j", "DROP", rest @ ..] => (Expr::Drop, rest),
        ["-j", "REDIRECT", "--to-ports", port, rest @ ..] => (Expr::Redirect(parse(port)?), rest),
        ["-j", "TPROXY", "--on-port", port, rest @ ..] => tproxy(port, rest)?,
        _ => return None,
    })
}

/// iptables prints the unspecified address if none was given.
fn tproxy<'a, 'w>(port: &str, tokens: &'a [&'w str]) -> Found<'a, 'w> {
    let tokens = match tokens {
        ["--on-ip", "0.0.0.0" | "::", rest @ ..] => rest,
        other => other,
    };
    let ["--tproxy-mark", marked, rest @ ..] = tokens else {
        return None;
    };
    Some((Expr::Tproxy(None, parse(port)?, mark(marked)?), rest))
}

/// Takes arguments up to the next known beginning.
fn unknown<'a, 'w>(tokens: &'a [&'w str]) -> (Option<Expr>, &'a [&'w str]) {
    let mut later = tokens.iter().skip(1);
    let end = later.position(|token| BEGINNINGS.contains(token));
    let (unknown, rest) = tokens.split_at(end.map_or(tokens.len(), |end| end.saturating_add(1)));
    let unknown: Vec<_> = unknown.iter().map(|&token| token.to_owned()).collect();
    (Some(Expr::Unknown(join(&unknown))), rest)
}

fn parse<T: FromStr>(text: &str) -> Option<T> {
    text.parse().ok()
}

/// Accepts whole names only: one ending in `+` is a prefix for iptables, and invalid for inpod.
fn interface(name: &str) -> Option<InterfaceName> {
    parse(name)
}

/// Parses hexadecimal value and mask. Without a mask all bits count.
fn mark(text: &str) -> Option<Mark> {
    let number = |text: &str| u32::from_str_radix(text.strip_prefix("0x")?, 16).ok();
    match text.split_once('/') {
        Some((value, mask)) => Mark::new(number(value)?, number(mask)?),
        None => Mark::new(number(text)?, u32::MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        family::Family,
        iptables::{normalize::normalize, render::render, tokens::split},
        rules::{ambient, scenarios},
    };

    fn lifted(tokens: &str) -> Rule {
        lift(&split(tokens).unwrap())
    }

    #[test]
    fn every_rule_of_ours_survives_the_way_to_iptables_words_and_back() {
        let all = scenarios::redirections().map(|(_, redirection)| redirection.ruleset());
        for ruleset in all.chain([ambient::drain()]) {
            for table in normalize(&ruleset, &Family::ALL) {
                for rule in table.chains.iter().flat_map(|chain| &chain.rules) {
                    assert_eq!(&lifted(&render(rule)), rule);
                }
            }
        }
    }

    /// iptables 1.8.9 adds an empty protocol match and the unspecified address.
    #[test]
    fn what_iptables_prints_otherwise_than_it_was_given_means_the_same() {
        let rule = lifted("-s 10.0.0.1/32 -p tcp -m tcp -j RETURN");
        assert_eq!(render(&rule), "-s 10.0.0.1/32 -p tcp -j RETURN");
        let rule = lifted(
            "-p tcp -m tcp --dport 1 -j TPROXY --on-port 2 --on-ip :: --tproxy-mark 0x111/0xfff",
        );
        let wanted = "-p tcp -m tcp --dport 1 -j TPROXY --on-port 2 --tproxy-mark 0x111/0xfff";
        assert_eq!(render(&rule), wanted);
        assert_eq!(
            lifted("-m mark --mark 0x1"),
            lifted("-m mark --mark 0x1/0xffffffff")
        );
    }

    #[test]
    fn what_is_not_ours_is_named_and_rendered_as_it_was() {
        for (tokens, unknown) in [
            (
                "-p tcp -m limit --limit 1/sec -j RETURN",
                "meta l4proto tcp <-m limit --limit 1/sec> accept",
            ),
            ("-j ACCEPT", "<-j ACCEPT>"),
            ("-g OTHER", "<-g OTHER>"),
            (
                "-p tcp -m tcp --dport 1:2 -j DROP",
                "meta l4proto tcp <--dport 1:2> drop",
            ),
            ("-i eth+ -j DROP", "<-i eth+> drop"),
            ("! -i eth0 -j DROP", "<! -i eth0> drop"),
            (
                "-m owner --uid-owner 1-9 -j DROP",
                "<-m owner --uid-owner 1-9> drop",
            ),
            (
                "-p udp -m udp --dport 1 -j REDIRECT --to-ports 2 --random",
                "meta l4proto udp th dport 1 redirect to :2 <--random>",
            ),
            (
                "-m comment --comment \"it\\'s theirs\" -j DROP",
                "<-m comment --comment \"it\\'s theirs\"> drop",
            ),
            (
                "-j TPROXY --on-port 2 --on-ip 10.0.0.1 --tproxy-mark 0x1/0xf",
                "<-j TPROXY --on-port 2 --on-ip 10.0.0.1 --tproxy-mark 0x1/0xf>",
            ),
            ("-m mark --mark 0x10/0xf", "<-m mark --mark 0x10/0xf>"),
        ] {
            let rule = lifted(tokens);
            assert_eq!(rule.to_string(), unknown);
            assert_eq!(
                render(&rule).replace("-m tcp ", ""),
                tokens.replace("-m tcp ", "")
            );
        }
    }

    /// iptables accepts ports only within a protocol's match.
    #[test]
    fn a_port_without_a_protocol_is_not_ours() {
        assert_eq!(lifted("--dport 1").to_string(), "<--dport 1>");
        let rule = lifted("-p udp -m multiport --dports 1,2 -j DROP").to_string();
        assert_eq!(rule, "meta l4proto udp <-m multiport --dports 1,2> drop");
    }
}
