//! A netns's packet filter and routes, within reach: sockets that were opened in it and are used from home, and
//! programs that run in it.

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

/// The tables of iptables-legacy that are in use, a name a line; not there before the first one is (ip_tables.c and
/// ip6_tables.c). Of the netns that the reading thread is in.
const LEGACY_TABLES: [&str; 2] = [
    "/proc/thread-self/net/ip_tables_names",
    "/proc/thread-self/net/ip6_tables_names",
];

/// Counters of a netns, two lines a protocol: names, then numbers (proc_net(5)). Of the netns that the reading thread is
/// in.
const COUNTERS: &str = "/proc/thread-self/net/snmp";

/// Connections that were begun, from here and from elsewhere (RFC 4022). Those that are merely passed on do not count.
const CONNECTION_COUNTERS: [&str; 2] = ["ActiveOpens", "PassiveOpens"];

/// Root, as this process numbers users.
const ROOT: u32 = 0;

/// How chains are named by inpod and by Istio's node agent, in tables of iptables.
const CHAIN_PREFIXES: [&str; 2] = ["INPOD_", "ISTIO_"];

/// Why a netns could not be reached.
#[derive(Debug, thiserror::Error)]
pub enum ReachError {
    /// It could not be entered.
    #[error("cannot reach into the netns")]
    Enter(#[from] EnterError),
    /// A netlink socket could not be opened in it, or a sysctl not be read.
    #[error("cannot open a netlink socket in the netns, or read its sysctls")]
    Socket(#[from] io::Error),
    /// A sysctl could not be written.
    #[error("cannot write the sysctl {TCP_MIGRATE_REQ_NAME} of the netns")]
    Sysctl(#[source] io::Error),
}

/// See the module.
#[derive(Debug)]
pub(crate) struct NetnsSession<'a> {
    pub(crate) netns: &'a Netns,
    programs: &'a Programs,
    pub(crate) nftables: Nftables,
    pub(crate) routes: Routes,
    sysctls: NetnsSysctls,
    facts: Facts,
}

/// What was seen inside.
#[derive(Clone, Copy, Debug)]
struct Facts {
    has_ipv6: bool,
    has_legacy_tables: bool,
    /// Root of the user namespace that owns the netns, as this process numbers users.
    root: u32,
    has_connected: bool,
    migrates: Option<bool>,
}

impl<'a> NetnsSession<'a> {
    /// Does something through a session.
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

    /// Enters the netns for as long as it takes to open two sockets and to look.
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

    /// The families that are switched on.
    pub(crate) fn families(&self) -> &'static [Family] {
        if self.facts.has_ipv6 {
            &Family::ALL
        } else {
            &[Family::V4]
        }
    }

    /// Whether another user namespace owns the netns (`hostUsers: false`), as far as that can be told: where its root is
    /// the same user as root of ours, it is taken for ours. From outside of that one the kernel lets
    /// iptables not ask for users and groups (owner_check in net/netfilter/xt_owner.c); nf_tables may, and both mean
    /// the numbers of that namespace (services/docs/facts/kernel.md, 15).
    pub(crate) fn has_other_users(&self) -> bool {
        self.facts.root != ROOT
    }

    /// The users whose sockets tables take for a sidecar's. Those of another user namespace are numbered from its root
    /// on, as a kubelet maps them (`hostUsers: false`).
    pub(crate) fn proxies<'t>(&self, tables: impl IntoIterator<Item = &'t Table>) -> Proxies {
        let users = tables.into_iter().flat_map(Table::users);
        Proxies::of(users.filter_map(|user| self.facts.root.checked_add(user)))
    }

    /// Reads everything back: what the backend holds that is to be used if nothing is there, and every other one of
    /// which there are signs.
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

    /// Whether a variant of iptables may hold something of ours or the incumbent's. The names of nf_tables' chains are
    /// certain. Of legacy tables it is only known that they are used: where its programs are missing, nobody here
    /// wrote them.
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

    /// The tables of a ruleset as a backend keeps them.
    pub(crate) fn shape(&self, backend: Backend, ruleset: &Ruleset) -> Vec<Table> {
        match variant_of(backend) {
            None => self.nftables.shape(ruleset),
            Some(variant) => self.iptables(variant).shape(ruleset),
        }
    }

    /// What a backend holds.
    pub(crate) fn read_backend(&mut self, backend: Backend) -> Result<Observed, BackendError> {
        match variant_of(backend) {
            None => self.nftables.read(),
            Some(variant) => self.iptables(variant).read(),
        }
    }

    /// Changes what a backend holds.
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

    /// A change in the words of the backend's program.
    pub(crate) fn script(&self, backend: Backend, seen: &Observed, change: &Change) -> String {
        match variant_of(backend) {
            None => self.nftables.script(seen, change),
            Some(variant) => self.iptables(variant).script(seen, change),
        }
    }

    /// Switches the sysctl.
    pub(crate) fn set_migrates(&mut self, on: bool) -> Result<(), ReachError> {
        let written = self.netns.within(|| self.sysctls.set_migrates(on))?;
        written.map_err(ReachError::Sysctl)?;
        self.facts.migrates = Some(on);
        Ok(())
    }
}

/// `None` for the backend that is no iptables.
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

/// Whether any TCP connection was ever begun, as far as the counters tell.
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
        // What does not tell may have one.
        assert!(has_tcp_history("Udp: InDatagrams\nUdp: 7\n"));
    }
}
