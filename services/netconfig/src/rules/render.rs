//! Rules as a script for `nft -f`: for goldens, plans and logs.

use std::{fmt, net::IpAddr};

use super::{Base, Chain, Expr, Hook, Kind, Policy, Rule, Ruleset, Table};

impl fmt::Display for Ruleset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.tables.iter().try_for_each(|table| table.fmt(f))
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "table inet {} {{", self.name)?;
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

impl fmt::Display for Expr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DestinationNot(IpAddr::V4(address)) => write!(f, "ip daddr != {address}"),
            Self::DestinationNot(IpAddr::V6(address)) => write!(f, "ip6 daddr != {address}"),
            Self::LeavesBy(name) => write!(f, "oifname \"{name}\""),
            Self::Tcp => write!(f, "meta l4proto tcp"),
            Self::PortNot(port) => write!(f, "tcp dport != {port}"),
            Self::Marked(mark) => {
                write!(f, "meta mark & {:#x} == {:#x}", mark.mask(), mark.value())
            }
            Self::NotMarked(mark) => {
                write!(f, "meta mark & {:#x} != {:#x}", mark.mask(), mark.value())
            }
            Self::ConnectionMarked(mark) => {
                write!(f, "ct mark & {:#x} == {:#x}", mark.mask(), mark.value())
            }
            Self::NewConnection => write!(f, "ct state new"),
            Self::Counter => write!(f, "counter"),
            Self::Mark(mark) => {
                let kept = !mark.mask();
                write!(
                    f,
                    "meta mark set meta mark & {kept:#x} | {:#x}",
                    mark.value()
                )
            }
            Self::MarkConnection(mark) => {
                let kept = !mark.mask();
                write!(f, "ct mark set ct mark & {kept:#x} | {:#x}", mark.value())
            }
            Self::Accept => write!(f, "accept"),
            Self::Redirect(port) => write!(f, "redirect to :{port}"),
            Self::Unknown(what) => write!(f, "<{what}>"),
        }
    }
}
