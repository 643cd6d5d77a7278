//! A session in one netns: netlink sockets that were opened inside and are used from outside, and
//! programs that run inside.

use std::{fs, io, path::Path};

use inpod_linux::{EnterError, Netns};

use crate::{
    backend::{Backend, BackendError, Change, Observed, RuleBackend},
    family::Family,
    inspect::Proxies,
    iptables::{Iptables, Programs, Variant},
    netlink::KernelError,
    nftables::Nftables,
    plan::State,
    routes::Routes,
    rules::{Ruleset, Table},
    sysctl::{NetnsSysctls, Sysctls, TCP_MIGRATE_REQ_NAME},
};

/// The tables of iptables-legacy that are in use, one name per line; absent before the first use (ip_tables.c and
/// ip6_tables.c). They show the netns of the reading thread.
const LEGACY_TABLES: [&str; 2] = [
    "/proc/thread-self/net/ip_tables_names",
    "/proc/thread-self/net/ip6_tables_names",
];

/// Protocol counters of the reading thread's netns: per protocol one line of names and one of values (proc_net(5)).
const COUNTERS: &str = "/proc/thread-self/net/snmp";

/// Counters of TCP connections opened from the netns and to it (RFC 4022). Forwarded connections do not count.
const CONNECTION_COUNTERS: [&str; 2] = ["ActiveOpens", "PassiveOpens"];

const ROOT: u32 = 0;

/// Name prefixes of the iptables chains of inpod and of Istio's node agent.
const CHAIN_PREFIXES: [&str; 2] = ["INPOD_", "ISTIO_"];

/// An error of opening or using a session.
#[derive(Debug, thiserror::Error)]
pub enum ReachError {
    #[error("cannot reach into the netns")]
    Enter(#[from] EnterError),
    #[error("cannot open a netlink socket in the netns, or read its sysctls")]
    Socket(#[from] io::Error),
    #[error("cannot write the sysctl {TCP_MIGRATE_REQ_NAME} of the netns")]
    Sysctl(#[source] io::Error),
}

#[derive(Debug)]
pub(crate) struct NetnsSession<'a> {
    pub(crate) netns: &'a Netns,
    programs: &'a Programs,
    pub(crate) nftables: Nftables,
    pub(crate) routes: Routes,
    sysctls: NetnsSysctls,
    facts: Facts,
}

/// Facts read from inside of the netns.
#[derive(Clone, Copy, Debug)]
struct Facts {
    has_ipv6: bool,
    has_legacy_tables: bool,
    /// The uid of root in the user namespace that owns the netns, as this process sees it.
    root: u32,
    has_connected: bool,
    migrates: Option<bool>,
}

impl<'a> NetnsSession<'a> {
    /// Opens a session, runs `work` in it and closes it.
    pub(crate) fn with<T, E: From<ReachError>>(
        netns: &'a Netns,
        programs: &'a Programs,
        sysctls: &Sysctls,
        work: impl FnOnce(&mut Self) -> Result<T, E>,
    ) -> Result<T, E> {
        let mut session = Self::open(netns, programs, sysctls)?;
        let result = work(&mut session);
        session.nftables.close();
        result
    }

    /// Enters the netns just long enough to open two sockets and to read the facts.
    fn open(
        netns: &'a Netns,
        programs: &'a Programs,
        sysctls: &Sysctls,
    ) -> Result<Self, ReachError> {
        let sysctls = sysctls.open_for_netns()?;
        let session = netns.within(|| {
            io::Result::Ok(Self {
                netns,
                programs,
                nftables: Nftables::open()?,
                routes: Routes::open()?,
                facts: Facts {
                    has_ipv6: sysctls.has_ipv6(),
                    has_legacy_tables: LEGACY_TABLES.iter().any(is_nonempty),
                    root: sysctls.root()?,
                    has_connected: fs::read_to_string(COUNTERS)
                        .map_or(true, |text| has_tcp_history(&text)),
                    migrates: sysctls.migrates()?,
                },
                sysctls,
            })
        })?;
        Ok(session?)
    }

    /// Returns the address families that are enabled.
    pub(crate) fn families(&self) -> &'static [Family] {
        if self.facts.has_ipv6 {
            &Family::ALL
        } else {
            &[Family::V4]
        }
    }

    /// Returns whether another user namespace owns the netns (`hostUsers: false`). A user namespace whose root is
    /// also this process's root goes unnoticed. From outside of that user namespace the kernel refuses iptables'
    /// owner match (owner_check in net/netfilter/xt_owner.c), but allows nf_tables' one; both count uids in that
    /// user namespace (services/docs/facts/kernel.md, 15).
    pub(crate) fn has_other_users(&self) -> bool {
        self.facts.root != ROOT
    }

    /// Returns the users that `tables` take for a sidecar's proxy, as this process sees them. In another user namespace
    /// uids count from its root, as the kubelet maps them (`hostUsers: false`).
    pub(crate) fn proxies<'t>(&self, tables: impl IntoIterator<Item = &'t Table>) -> Proxies {
        let users = tables.into_iter().flat_map(Table::matched_users);
        Proxies::of(users.filter_map(|user| self.facts.root.checked_add(user)))
    }

    /// Reads the state of the netns: the rules of nf_tables, of the preferred backend, and of every other backend
    /// that may hold rules.
    pub(crate) fn read(&mut self, preferred: Backend) -> Result<State, BackendError> {
        let mut seen = vec![(Backend::Nftables, self.nftables.read()?)];
        for variant in [Variant::Nft, Variant::Legacy] {
            let backend = variant.into();
            if preferred == backend || self.may_hold_rules(variant)? {
                seen.push((backend, self.iptables(variant).read()?));
            }
        }
        Ok(State {
            seen,
            routing: self.routes.read()?,
            has_connected: self.facts.has_connected,
            migrates: self.facts.migrates,
        })
    }

    /// Returns whether an iptables variant may hold rules of inpod or of the incumbent. For iptables-nft the names of
    /// its chains decide. For iptables-legacy it is only known whether tables are in use; if its programs are missing,
    /// none of them are inpod's.
    fn may_hold_rules(&mut self, variant: Variant) -> Result<bool, KernelError> {
        match variant {
            Variant::Nft => {
                let chains = self.nftables.chains_of_iptables()?;
                let is_known =
                    |chain: &String| CHAIN_PREFIXES.iter().any(|known| chain.starts_with(known));
                Ok(chains.iter().any(is_known))
            }
            Variant::Legacy => Ok(self.facts.has_legacy_tables && self.programs.has(variant)),
        }
    }

    fn iptables(&self, variant: Variant) -> Iptables<'a> {
        Iptables::new(self.programs, variant, self.netns)
    }

    /// Normalizes the tables of a ruleset to the form in which a backend holds them.
    pub(crate) fn normalize(&self, backend: Backend, ruleset: &Ruleset) -> Vec<Table> {
        match variant_of(backend) {
            None => self.nftables.normalize(ruleset),
            Some(variant) => self.iptables(variant).normalize(ruleset),
        }
    }

    pub(crate) fn read_backend(&mut self, backend: Backend) -> Result<Observed, BackendError> {
        match variant_of(backend) {
            None => self.nftables.read(),
            Some(variant) => self.iptables(variant).read(),
        }
    }

    pub(crate) fn change(
        &mut self,
        backend: Backend,
        seen: &Observed,
        change: &Change,
    ) -> Result<(), BackendError> {
        match variant_of(backend) {
            None => self.nftables.change(seen, change),
            Some(variant) => self.iptables(variant).change(seen, change),
        }
    }

    /// Renders a change in the syntax of the backend's program.
    pub(crate) fn script(&self, backend: Backend, seen: &Observed, change: &Change) -> String {
        match variant_of(backend) {
            None => self.nftables.script(seen, change),
            Some(variant) => self.iptables(variant).script(seen, change),
        }
    }

    /// Sets the sysctl `tcp_migrate_req` of the netns.
    pub(crate) fn set_migrates(&mut self, on: bool) -> Result<(), ReachError> {
        let written = self.netns.within(|| self.sysctls.set_migrates(on))?;
        written.map_err(ReachError::Sysctl)?;
        self.facts.migrates = Some(on);
        Ok(())
    }
}

/// Returns the iptables variant of a backend, `None` for nf_tables.
pub(crate) fn variant_of(backend: Backend) -> Option<Variant> {
    match backend {
        Backend::Nftables => None,
        Backend::IptablesNft => Some(Variant::Nft),
        Backend::IptablesLegacy => Some(Variant::Legacy),
    }
}

impl From<Variant> for Backend {
    fn from(variant: Variant) -> Self {
        match variant {
            Variant::Nft => Self::IptablesNft,
            Variant::Legacy => Self::IptablesLegacy,
        }
    }
}

/// Returns whether TCP connections were ever opened in the netns, according to its counters.
fn has_tcp_history(counters: &str) -> bool {
    let mut of_tcp = counters.lines().filter_map(|it| it.strip_prefix("Tcp:"));
    let (Some(names), Some(numbers)) = (of_tcp.next(), of_tcp.next()) else {
        return true;
    };
    let mut found = names.split_whitespace().zip(numbers.split_whitespace());
    found.any(|(name, number)| CONNECTION_COUNTERS.contains(&name) && number != "0")
}

fn is_nonempty(path: impl AsRef<Path>) -> bool {
    fs::read(path).is_ok_and(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_netns_in_which_no_connection_was_begun_is_told_from_one_that_has_a_past() {
        let counters = |active, passive| {
            format!(
                "Udp: InDatagrams\nUdp: 7\nTcp: RtoMin ActiveOpens PassiveOpens InSegs\n\
                 Tcp: 200 {active} {passive} 12\n"
            )
        };
        assert!(!has_tcp_history(&counters(0, 0)));
        assert!(has_tcp_history(&counters(1, 0)));
        assert!(has_tcp_history(&counters(0, 30)));
        // Without TCP counters, connections must be assumed.
        assert!(has_tcp_history("Udp: InDatagrams\nUdp: 7\n"));
    }
}
