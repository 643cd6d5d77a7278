//! Describes the rules of a redirection as data.
//!
//! A pure function turns a [`Redirection`] into a [`Ruleset`], which does not depend on netlink and is printed as a
//! script for `nft -f`.

pub mod ambient;
mod expr;
mod fingerprint;
mod render;
pub mod sidecar;
mod tag;

pub use expr::{Expr, Transport};
pub use fingerprint::Fingerprint;
pub use inpod_types::redirection::{
    Ambient, Exclusions, InboundCapture, InterfaceName, Ipv6, Loopback, Network, Owner, Selection,
    Sidecar,
};
pub(crate) use tag::sandbox_name;
pub use tag::{ForeignComment, Tag};

use std::fmt;

use crate::family::Family;

/// The version of rules and tag; pods with another version are rewritten.
pub const SCHEMA: u32 = 2;

/// The complete settings of a pod's redirection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Redirection {
    /// Redirects to the node's ztunnel, which listens in the pod's netns.
    Ambient(Ambient),
    /// Redirects to a proxy in the pod.
    Sidecar(Sidecar),
}

/// Forms of redirection that need different routes and addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Ambient,
    Sidecar,
    /// Sidecar mode with inbound TCP captured by TPROXY.
    SidecarByTproxy,
}

impl Form {
    pub(crate) const ALL: [Self; 3] = [Self::Ambient, Self::Sidecar, Self::SidecarByTproxy];
}

impl Redirection {
    pub fn ruleset(&self) -> Ruleset {
        match self {
            Self::Ambient(settings) => ambient::ruleset(settings),
            Self::Sidecar(settings) => sidecar::ruleset(settings),
        }
    }

    pub(crate) fn form(&self) -> Form {
        match self {
            Self::Ambient(_) => Form::Ambient,
            Self::Sidecar(settings) if settings.captures_by_tproxy() => Form::SidecarByTproxy,
            Self::Sidecar(_) => Form::Sidecar,
        }
    }

    pub(crate) fn for_new_connections_only(&self) -> Option<Self> {
        if self.keeps_existing() {
            return None;
        }
        let mut new_only = self.clone();
        match &mut new_only {
            Self::Ambient(settings) => settings.keep_existing_connections = true,
            Self::Sidecar(settings) => settings.keep_existing_connections = true,
        }
        Some(new_only)
    }

    pub(crate) fn keeps_existing(&self) -> bool {
        match self {
            Self::Ambient(settings) => settings.keep_existing_connections,
            Self::Sidecar(settings) => settings.keep_existing_connections,
        }
    }

    pub(crate) fn ipv6(&self) -> Ipv6 {
        match self {
            Self::Ambient(settings) => settings.ipv6,
            Self::Sidecar(settings) => settings.ipv6,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ruleset {
    /// The tables in the order of creation; the last table completes the redirection.
    pub tables: Vec<Table>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    pub family: TableFamily,
    pub name: String,
    pub chains: Vec<Chain>,
}

impl Ruleset {
    /// Omits the rules that need the expressions `socket` and `reject`.
    pub(crate) fn without_guard(mut self) -> Self {
        for table in &mut self.tables {
            table.chains.retain(|chain| !chain.is_guard());
        }
        self
    }

    pub(crate) fn has_guard(&self) -> bool {
        let mut chains = self.tables.iter().flat_map(|table| &table.chains);
        chains.any(Chain::is_guard)
    }
}

impl Table {
    /// Returns whether a rule matches the owner of a socket, as only a sidecar's rules do.
    pub(crate) fn matches_socket_owners(&self) -> bool {
        self.has(|expr| {
            matches!(
                expr,
                Expr::FromUser(_) | Expr::FromGroup(_) | Expr::NotFromGroup(_)
            )
        })
    }

    /// Returns the users of the sidecar's proxy, once per rule.
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

    pub(crate) fn has(&self, holds: impl Fn(&Expr) -> bool) -> bool {
        let mut rules = self.chains.iter().flat_map(|chain| &chain.rules);
        rules.any(|rule| rule.0.iter().any(&holds))
    }

    pub(crate) fn captures(&self) -> bool {
        let captures = |rule: &Rule| rule.0.iter().any(Expr::captures);
        let mut entered = self.chains.iter().filter(|chain| chain.base.is_some());
        entered.any(|chain| chain.rules.iter().any(captures))
    }

    pub(crate) fn id(&self) -> (TableFamily, String) {
        (self.family, self.name.clone())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TableFamily {
    /// A table for both families, which only nf_tables has.
    Inet,
    Ip,
    Ip6,
    /// A table for frames between ports of a bridge.
    Bridge,
}

impl TableFamily {
    pub fn has(self, family: Family) -> bool {
        match self {
            Self::Inet => true,
            Self::Ip => family == Family::V4,
            Self::Ip6 => family == Family::V6,
            Self::Bridge => false,
        }
    }
}

impl fmt::Display for TableFamily {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Inet => "inet",
            Self::Ip => "ip",
            Self::Ip6 => "ip6",
            Self::Bridge => "bridge",
        })
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    pub name: String,
    /// The hook of a base chain; `None` for chains reached only by jumps.
    pub base: Option<Base>,
    pub rules: Vec<Rule>,
}

impl Chain {
    fn is_guard(&self) -> bool {
        self.rules.iter().any(Rule::is_guard)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Base {
    pub kind: Kind,
    pub hook: Hook,
    /// The priority among the chains of the hook.
    pub priority: i32,
    /// The policy for packets without a verdict.
    pub policy: Policy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Filter,
    /// Sees each connection's first packet, and may translate the connection.
    Nat,
    /// Sees every packet, and reroutes packets whose mark the chain changes.
    Route,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    Prerouting,
    Input,
    Forward,
    Output,
    Postrouting,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    Accept,
    Drop,
}

/// A list of expressions, evaluated in order until one does not match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule(pub Vec<Expr>);

impl Rule {
    /// Returns whether the rule refuses packets, as only the rules on ztunnel's ports do.
    pub(crate) fn is_guard(&self) -> bool {
        let refuses = |expr: &Expr| matches!(expr, Expr::Refuse(_));
        self.0.iter().any(refuses)
    }
}
