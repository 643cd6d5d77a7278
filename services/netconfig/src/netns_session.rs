//! A session in one netns: netlink sockets opened inside and used from outside, and programs that run inside.

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

/// iptables-legacy's tables in use, one name per line; absent before first use (ip_tables.c and ip6_tables.c). Of
/// the reading thread's netns.
const LEGACY_TABLES: [&str; 2] = [
    "/proc/thread-self/net/ip_tables_names",
    "/proc/thread-self/net/ip6_tables_names",
];

/// Of the reading thread's netns: a line of names and one of values per protocol (proc_net(5)).
const COUNTERS: &str = "/proc/thread-self/net/snmp";

/// TCP connections opened from and to the netns (RFC 4022). Forwarded ones do not count.
const CONNECTION_COUNTERS: [&str; 2] = ["ActiveOpens", "PassiveOpens"];

const ROOT: u32 = 0;

/// Prefixes of inpod's and Istio's node agent's chains.
const CHAIN_PREFIXES: [&str; 2] = ["INPOD_", "ISTIO_"];

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

/// Facts from inside the netns.
#[derive(Clone, Copy, Debug)]
struct Facts {
    has_ipv6: bool,
    has_legacy_tables: bool,
    /// Uid, as this process sees it, of root in the owning user namespace.
    root: u32,
    has_connected: bool,
    migrates: Option<bool>,
}

impl<'a> NetnsSession<'a> {
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

    /// Enters the netns just to open two sockets and read the facts.
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

    pub(crate) fn families(&self) -> &'static [Family] {
        if self.facts.has_ipv6 {
            &Family::ALL
        } else {
            &[Family::V4]
        }
    }

    /// Returns whether another user namespace owns the netns (`hostUsers: false`), unless its
    /// root is also this process's. From outside of it the kernel refuses iptables' owner
    /// match (owner_check in net/netfilter/xt_owner.c), but allows nf_tables' one; both count
    /// uids in it (services/docs/facts/kernel.md, 15).
    pub(crate) fn has_other_users(&self) -> bool {
        self.facts.root != ROOT
    }

    /// Returns users that `tables` take for a sidecar's proxy, as this process sees them. In another user namespace
    /// uids count from its root, as the kubelet maps them (`hostUsers: false`).
    pub(crate) fn proxies<'t>(&self, tables: impl IntoIterator<Item = &'t Table>) -> Proxies {
        let users = tables.into_iter().flat_map(Table::matched_users);
        Proxies::of(users.filter_map(|user| self.facts.root.checked_add(user)))
    }

    /// Reads nf_tables' rules, the preferred backend's, and every other backend's that may hold rules.
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

    /// Returns whether a variant may hold rules of inpod or the incumbent. iptables-nft's chain names decide it. Of
    /// iptables-legacy only the use of tables is known; if its programs are missing, none are inpod's.
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

    pub(crate) fn script(&self, backend: Backend, seen: &Observed, change: &Change) -> String {
        match variant_of(backend) {
            None => self.nftables.script(seen, change),
            Some(variant) => self.iptables(variant).script(seen, change),
        }
    }

    pub(crate) fn set_migrates(&mut self, on: bool) -> Result<(), ReachError> {
        let written = self.netns.within(|| self.sysctls.set_migrates(on))?;
        written.map_err(ReachError::Sysctl)?;
        self.facts.migrates = Some(on);
        Ok(())
    }
}

/// Returns `None` for nf_tables.
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
        // Without counters, connections must be assumed.
        assert!(has_tcp_history("Udp: InDatagrams\nUdp: 7\n"));
    }
}
