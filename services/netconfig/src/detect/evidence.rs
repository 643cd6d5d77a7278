//! Tries the backends in a temporary netns.

use std::{fs, io, thread};

use inpod_linux::Netns;
use nix::sched::{CloneFlags, unshare};
use serde::{Deserialize, Serialize};

use inpod_types::with_causes;

use crate::{
    backend::{BackendError, Change, NewTable, RuleBackend, Variant},
    iptables::{Iptables, Programs},
    nftables::Nftables,
    rules::ambient,
};

/// iptables-legacy tables in use in this process's netns, which is the node's.
const LEGACY_TABLES: [&str; 2] = ["/proc/net/ip_tables_names", "/proc/net/ip6_tables_names"];

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Evidence {
    /// Nat and route chains of family inet, over netlink.
    pub(super) nftables: TrialOutcome,
    pub(super) iptables_nft: IptablesEvidence,
    pub(super) iptables_legacy: IptablesEvidence,
    pub(super) node_has_legacy_tables: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct IptablesEvidence {
    pub(super) missing: Vec<String>,
    pub(super) version: Option<String>,
    pub(super) trial: TrialOutcome,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum TrialOutcome {
    /// Not needed. Trying iptables-legacy would load modules that stay in the node's kernel.
    #[default]
    Untried,
    Usable,
    Refused(String),
}

impl Evidence {
    pub(super) fn collect(programs: &Programs) -> Self {
        let found = |variant| IptablesEvidence {
            missing: programs.missing(variant),
            version: programs.version(variant).map(|version| version.to_string()),
            trial: TrialOutcome::Untried,
        };
        let mut evidence = Self {
            nftables: TrialOutcome::Untried,
            iptables_nft: found(Variant::Nft),
            iptables_legacy: found(Variant::Legacy),
            node_has_legacy_tables: LEGACY_TABLES
                .iter()
                .any(|path| fs::read(path).is_ok_and(|names| !names.is_empty())),
        };
        match scratch_netns() {
            Ok(netns) => evidence.try_in(&netns, programs),
            Err(error) => tracing::warn!(%error, "Cannot create a netns to try backends in"),
        }
        tracing::info!(?evidence, "Detected usable backends");
        evidence
    }

    fn try_in(&mut self, netns: &Netns, programs: &Programs) {
        self.nftables = result(nftables(netns));
        if self.nftables != TrialOutcome::Usable {
            self.iptables_legacy.trial = result(iptables(programs, Variant::Legacy, netns));
            self.iptables_nft.trial = result(iptables(programs, Variant::Nft, netns));
        }
    }

    pub(super) fn of(&self, variant: Variant) -> &IptablesEvidence {
        match variant {
            Variant::Nft => &self.iptables_nft,
            Variant::Legacy => &self.iptables_legacy,
        }
    }
}

fn result(check_usable: Result<(), BackendError>) -> TrialOutcome {
    match check_usable {
        Ok(()) => TrialOutcome::Usable,
        Err(error) => TrialOutcome::Refused(with_causes(&error)),
    }
}

/// Creates a netns that lives as long as the returned value.
fn scratch_netns() -> io::Result<Netns> {
    let made = thread::Builder::new().spawn(|| {
        unshare(CloneFlags::CLONE_NEWNET)?;
        Netns::current().map_err(io::Error::other)
    })?;
    let panicked = |_| Err(io::Error::other("the thread panicked"));
    made.join().unwrap_or_else(panicked)
}

fn nftables(netns: &Netns) -> Result<(), BackendError> {
    let entered = netns.within(Nftables::open).map_err(io::Error::other);
    let refused = |error| crate::netlink::KernelError::new("open a netlink socket", error);
    let mut nftables = entered.and_then(|opened| opened).map_err(refused)?;
    let check_usable = write_trial_rules(&mut nftables);
    nftables.close();
    check_usable
}

fn iptables(programs: &Programs, variant: Variant, netns: &Netns) -> Result<(), BackendError> {
    write_trial_rules(&mut Iptables::new(programs, variant, netns))
}

/// Needs nat and route chains, and connection tracking.
fn write_trial_rules(backend: &mut impl RuleBackend) -> Result<(), BackendError> {
    let tables = backend.normalize(&ambient::drain()).into_iter();
    let create = tables.map(|table| NewTable {
        table,
        comment: "a trial".to_owned(),
    });
    let change = Change {
        create: create.collect(),
        ..Change::default()
    };
    let seen = backend.read()?;
    backend.change(&seen, &change)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_refused_by_name() {
        let netns = Netns::current().unwrap();
        let trial = result(iptables(&Programs::default(), Variant::Legacy, &netns));
        let TrialOutcome::Refused(why) = trial else {
            panic!("{trial:?}");
        };
        assert!(why.contains("iptables-legacy-save"), "{why}");
    }
}
