//! What is to be in a netns's packet filter, as data.
//!
//! A [`Redirection`] becomes a [`Ruleset`] by a pure function. It means the same to every backend, and prints as a
//! script for `nft -f`.

pub mod ambient;
mod expr;
mod fingerprint;
mod render;
pub mod scenarios;
mod settings;
pub mod sidecar;
mod tag;

pub use expr::{Expr, Transport};
pub use fingerprint::Fingerprint;
pub use settings::{
    Ambient, Exclusions, InboundCapture, InterfaceName, Ipv6, Network, NoInterfaceName, NoNetwork,
};
pub use sidecar::{Loopback, NoLoopback, Owner, Selection, Sidecar};
pub(crate) use tag::sandbox_name;
pub use tag::{ForeignComment, Tag};

use std::fmt;

use crate::family::Family;

/// The version of how rules are written and tagged. A netns that carries another one is rewritten.
pub const SCHEMA: u32 = 2;

/// How a pod's traffic is to be redirected. The whole of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Redirection {
    /// To the node's ztunnel, which listens in the pod's netns.
    Ambient(Ambient),
    /// To a proxy in the pod.
    Sidecar(Sidecar),
}

/// What a redirection is of, as far as it matters beside its tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// Ambient mode.
    Ambient,
    /// A sidecar, to which nothing is led by TPROXY.
    Sidecar,
    /// A sidecar, to which inbound TCP is led by TPROXY.
    SidecarByTproxy,
}

impl Form {
    /// All of them.
    pub(crate) const ALL: [Self; 3] = [Self::Ambient, Self::Sidecar, Self::SidecarByTproxy];
}

impl Redirection {
    /// The rules that do it.
    pub fn ruleset(&self) -> Ruleset {
        match self {
            Self::Ambient(settings) => ambient::ruleset(settings),
            Self::Sidecar(settings) => sidecar::ruleset(settings),
        }
    }

    /// What it is of.
    pub(crate) fn form(&self) -> Form {
        match self {
            Self::Ambient(_) => Form::Ambient,
            Self::Sidecar(settings) if settings.captures_by_tproxy() => Form::SidecarByTproxy,
            Self::Sidecar(_) => Form::Sidecar,
        }
    }

    /// The same, capturing only what begins; `None` where it does no more.
    pub(crate) fn for_new_connections_only(&self) -> Option<Self> {
        if self.keeps_existing() {
            return None;
        }
        let keep_existing_connections = true;
        Some(match self.clone() {
            Self::Ambient(settings) => Self::Ambient(Ambient {
                keep_existing_connections,
                ..settings
            }),
            Self::Sidecar(settings) => Self::Sidecar(Sidecar {
                keep_existing_connections,
                ..settings
            }),
        })
    }

    /// Whether connections from before go on as they are.
    pub(crate) fn keeps_existing(&self) -> bool {
        match self {
            Self::Ambient(settings) => settings.keep_existing_connections,
            Self::Sidecar(settings) => settings.keep_existing_connections,
        }
    }

    /// Whether IPv6 is captured.
    pub(crate) fn ipv6(&self) -> Ipv6 {
        match self {
            Self::Ambient(settings) => settings.ipv6,
            Self::Sidecar(settings) => settings.ipv6,
        }
    }
}

/// Tables, each with its chains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ruleset {
    /// The tables, in the order in which they take effect: the last one commits.
    pub tables: Vec<Table>,
}

/// A table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// The packets that it sees.
    pub family: TableFamily,
    /// Its name.
    pub name: String,
    /// Its chains, in no order that matters.
    pub chains: Vec<Chain>,
}

impl Ruleset {
    /// Whether it asks whose socket sends a packet.
    pub(crate) fn matches_socket_owners(&self) -> bool {
        self.tables.iter().any(Table::matches_socket_owners)
    }
}

impl Table {
    /// Whether a rule of it asks whose socket sends a packet, which those of a sidecar alone do.
    pub(crate) fn matches_socket_owners(&self) -> bool {
        self.has(|expr| {
            matches!(
                expr,
                Expr::FromUser(_) | Expr::FromGroup(_) | Expr::NotFromGroup(_)
            )
        })
    }

    /// The users that it asks for: those that a sidecar's proxy runs as, once for each rule that does.
    pub(crate) fn matched_users(&self) -> impl Iterator<Item = u32> {
        let rules = self.chains.iter().flat_map(|chain| &chain.rules);
        let user = |expr: &Expr| {
            if let Expr::FromUser(user) = expr {
                Some(*user)
            } else {
                None
            }
        };
        rules.flat_map(|rule| &rule.0).filter_map(user)
    }

    /// Whether there is an expression in a rule of it of which something holds.
    pub(crate) fn has(&self, holds: impl Fn(&Expr) -> bool) -> bool {
        let mut rules = self.chains.iter().flat_map(|chain| &chain.rules);
        rules.any(|rule| rule.0.iter().any(&holds))
    }

    /// Whether packets that enter it are captured, some of them.
    pub(crate) fn captures(&self) -> bool {
        let captures = |rule: &Rule| rule.0.iter().any(Expr::captures);
        let mut entered = self.chains.iter().filter(|chain| chain.base.is_some());
        entered.any(|chain| chain.rules.iter().any(captures))
    }

    /// Which table it is.
    pub(crate) fn id(&self) -> (TableFamily, String) {
        (self.family, self.name.clone())
    }
}

/// The packets that a table sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TableFamily {
    /// Those of both families. nf_tables alone has such tables.
    Inet,
    /// Those of IPv4.
    Ip,
    /// Those of IPv6.
    Ip6,
}

impl TableFamily {
    /// Whether a table of this family sees packets of that one.
    pub fn has(self, family: Family) -> bool {
        match self {
            Self::Inet => true,
            Self::Ip => family == Family::V4,
            Self::Ip6 => family == Family::V6,
        }
    }
}

impl fmt::Display for TableFamily {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Inet => "inet",
            Self::Ip => "ip",
            Self::Ip6 => "ip6",
        })
    }
}

/// A chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// Its name.
    pub name: String,
    /// Where packets enter it; `None` for one that is only jumped to.
    pub base: Option<Base>,
    /// Its rules, in order.
    pub rules: Vec<Rule>,
}

/// Where packets enter a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Base {
    /// What the chain may do.
    pub kind: Kind,
    /// At which point of a packet's way.
    pub hook: Hook,
    /// In which order among the chains of that point.
    pub priority: i32,
    /// What happens to a packet that no rule decided on.
    pub policy: Policy,
}

/// What a base chain may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Looks at every packet.
    Filter,
    /// Looks at the first packet of a connection and may redirect it.
    Nat,
    /// Looks at every packet and, where it changed the mark, routes it again.
    Route,
}

/// A point of a packet's way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// Arrived, not routed yet.
    Prerouting,
    /// For this netns.
    Input,
    /// Passing through.
    Forward,
    /// Made in this netns.
    Output,
    /// About to leave.
    Postrouting,
}

/// The fate of a packet that no rule decided on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// It goes on.
    Accept,
    /// It is gone.
    Drop,
}

/// A rule: each expression in turn, until one does not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule(pub Vec<Expr>);
