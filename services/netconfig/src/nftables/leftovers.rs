//! Finds leftovers of Istio, or of an inpod that still wrote iptables, in nf_tables: tables of their own, or chains
//! and rules in the tables of iptables-nft (services/docs/facts/istio-ambient.md, 1.8, and istio-sidecar.md, 4.3 to
//! 4.8).
//!
//! inpod never deletes tables and base chains of iptables-nft, because a policy or a rule of the user may be in
//! them. Rules in iptables' legacy tables cannot be read over netlink.

mod meaning;
mod push;

use std::collections::BTreeMap;

pub(super) use meaning::Meaning;
pub(super) use push::{push_deletions, render_deletions};

use super::observed::TableId;
use crate::{family::Family, rules::TableFamily};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Author {
    /// Istio's node agent.
    Agent,
    /// Istio's sidecar installer.
    Sidecar,
    /// inpod's backends for iptables, which existed in release 0.1.
    Inpod,
}

impl Author {
    /// Returns whether every redirection replaces the author's rules. Rules of the sidecar installer are replaced
    /// only where inpod redirects to the sidecar itself.
    pub(crate) fn is_replaced_by_all(self) -> bool {
        self != Self::Sidecar
    }
}

/// Tables of family inet that belong to Istio as a whole.
const TABLES: [(&str, Author); 6] = [
    ("istio-ambient-nat", Author::Agent),
    ("istio-ambient-mangle", Author::Agent),
    ("istio-ambient-raw", Author::Agent),
    ("istio-proxy-nat", Author::Sidecar),
    ("istio-proxy-mangle", Author::Sidecar),
    ("istio-proxy-raw", Author::Sidecar),
];

/// The tables of iptables-nft that contain the chains of leftovers.
const IPTABLES_TABLES: [&str; 3] = ["raw", "mangle", "nat"];

const INPOD_PREFIX: &str = "INPOD_";

/// Chains of Istio's node agent.
const AGENT_CHAINS: [&str; 2] = ["ISTIO_PRERT", "ISTIO_OUTPUT"];

/// A chain always present in the nat table of a sidecar. If the chain exists, `ISTIO_OUTPUT` is the sidecar's, not
/// the node agent's.
const SIDECAR_MARKER: &str = "ISTIO_REDIRECT";

const SIDECAR_CHAINS: [&str; 8] = [
    "ISTIO_INBOUND",
    "ISTIO_OUTPUT",
    SIDECAR_MARKER,
    "ISTIO_IN_REDIRECT",
    "ISTIO_OUTPUT_DNS",
    "ISTIO_DIVERT",
    "ISTIO_TPROXY",
    "ISTIO_DROP",
];

/// Chains with rules of the sidecar installer that do not jump to the installer's chains.
const CHAINS_WITH_STANDALONE_RULES: [&str; 2] = ["PREROUTING", "OUTPUT"];

/// Returns whether a chain of this name may be a leftover, so that the rules around the chain have to be read.
pub(super) fn is_known(chain: &str) -> bool {
    chain.starts_with(INPOD_PREFIX)
        || AGENT_CHAINS.contains(&chain)
        || SIDECAR_CHAINS.contains(&chain)
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Leftovers {
    tables: Vec<(Author, &'static str)>,
    chains: Vec<Chain>,
    /// Rules in other chains: jumps to `chains`, and standalone rules.
    rules: Vec<Rule>,
    /// True if an earlier inpod enabled `net.ipv4.tcp_migrate_req`.
    pub(crate) migrates: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Chain {
    author: Author,
    table: TableId,
    name: String,
    is_empty: bool,
    /// True if an object which stays, such as a verdict map, refers to the chain; such a chain is emptied and
    /// stays.
    is_referenced: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Rule {
    author: Author,
    table: TableId,
    chain: String,
    handle: u64,
}

/// A chain of iptables-nft as the kernel lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SeenChain {
    pub(super) table: TableId,
    pub(super) name: String,
    /// The kernel's count of the chain's rules and of references to the chain.
    pub(super) uses: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SeenRule {
    pub(super) table: TableId,
    pub(super) chain: String,
    pub(super) handle: u64,
    pub(super) meaning: Meaning,
}

impl Leftovers {
    /// Finds the leftovers among the names of tables of family inet, and all chains and rules of iptables-nft's
    /// families.
    pub(super) fn find<'a>(
        tables: impl Iterator<Item = &'a str>,
        chains: &[SeenChain],
        rules: &[SeenRule],
    ) -> Self {
        let tables = tables.filter_map(|name| {
            let mut known = TABLES.into_iter();
            known.find(|(table, _)| *table == name)
        });
        let mut found = Self {
            tables: tables.map(|(name, author)| (author, name)).collect(),
            ..Self::default()
        };
        let authors = authors_of(chains);
        for rule in rules {
            if let Some(author) = author_of_rule(rule, &authors) {
                found.migrates |= author == Author::Inpod && rule.meaning.migrates();
                found.rules.push(Rule {
                    author,
                    table: rule.table.clone(),
                    chain: rule.chain.clone(),
                    handle: rule.handle,
                });
            }
        }
        for chain in chains {
            let holds = rules.iter().filter(|rule| chain.holds(rule)).count();
            let jumps = rules.iter().map(|rule| chain.jumps_from(rule));
            let explained = holds + jumps.sum::<usize>();
            if let Some(author) = author_in(&authors, &chain.table, &chain.name) {
                found.chains.push(Chain {
                    author,
                    table: chain.table.clone(),
                    name: chain.name.clone(),
                    is_empty: holds == 0,
                    is_referenced: usize::try_from(chain.uses) != Ok(explained),
                });
            }
        }
        // Empty chains without a jump to them do nothing, and may be chains that had to stay.
        let has_effect = |author: Author| {
            let of_it = |chain: &Chain| chain.author == author && !chain.is_empty;
            found.rules.iter().any(|rule| rule.author == author) || found.chains.iter().any(of_it)
        };
        let chains = found.chains.iter();
        let chains = chains.filter(|chain| has_effect(chain.author)).cloned();
        found.chains = chains.collect();
        found
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.tables.is_empty() && self.chains.is_empty() && self.rules.is_empty()
    }

    pub(crate) fn has(&self, of: impl Fn(Author) -> bool) -> bool {
        let tables = self.tables.iter().map(|(author, _)| *author);
        let chains = self.chains.iter().map(|chain| chain.author);
        let rules = self.rules.iter().map(|rule| rule.author);
        tables.chain(chains).chain(rules).any(of)
    }

    /// Returns the leftovers of the selected authors.
    pub(crate) fn select(&self, of: impl Fn(Author) -> bool) -> Self {
        let mut some = self.clone();
        some.tables.retain(|(author, _)| of(*author));
        some.chains.retain(|chain| of(chain.author));
        some.rules.retain(|rule| of(rule.author));
        some
    }

    /// Returns whether rules capture connections of a family. A table of family inet captures both families; chains
    /// capture the family of the jumps to them.
    pub(crate) fn captures(&self, family: Family, of: impl Fn(Author) -> bool) -> bool {
        let mut rules = self.rules.iter();
        self.tables.iter().any(|(author, _)| of(*author))
            || rules.any(|rule| of(rule.author) && rule.table.0.has(family))
    }

    /// Returns the names of an author's tables and chains.
    pub(crate) fn names(&self, author: Author) -> Vec<String> {
        let tables = self.tables.iter().filter(|(found, _)| *found == author);
        let chains = self.chains.iter().filter(|chain| chain.author == author);
        let tables = tables.map(|(_, name)| (*name).to_owned());
        tables.chain(chains.map(Chain::describe)).collect()
    }
}

type Authors = BTreeMap<(TableId, String), Author>;

fn authors_of(chains: &[SeenChain]) -> Authors {
    let in_iptables = chains.iter().filter(|chain| {
        let (family, table) = &chain.table;
        *family != TableFamily::Inet && IPTABLES_TABLES.contains(&table.as_str())
    });
    let author = |chain: &SeenChain| {
        let (name, family) = (chain.name.as_str(), chain.table.0);
        let [prerouting, _] = AGENT_CHAINS;
        let mut family = chains.iter().filter(|other| other.table.0 == family);
        let has_sidecar = family.any(|other| other.name == SIDECAR_MARKER);
        let has_prerouting = || {
            let mut table = chains.iter().filter(|other| other.table == chain.table);
            table.any(|other| other.name == prerouting)
        };
        if name.starts_with(INPOD_PREFIX) {
            Some(Author::Inpod)
        } else if AGENT_CHAINS.contains(&name) && (!has_sidecar || has_prerouting()) {
            Some(Author::Agent)
        } else {
            SIDECAR_CHAINS.contains(&name).then_some(Author::Sidecar)
        }
    };
    let named =
        |chain: &SeenChain| Some(((chain.table.clone(), chain.name.clone()), author(chain)?));
    in_iptables.filter_map(named).collect()
}

fn author_in(authors: &Authors, table: &TableId, chain: &str) -> Option<Author> {
    authors.get(&(table.clone(), chain.to_owned())).copied()
}

/// Returns the author of the chains to which the rule leads, unless the rule is deleted together with its own
/// chain.
fn author_of_rule(rule: &SeenRule, authors: &Authors) -> Option<Author> {
    let of_chain = |chain: &String| author_in(authors, &rule.table, chain);
    let author = rule.meaning.targets.iter().find_map(of_chain);
    let author = author.or_else(|| is_standalone(rule, authors).then_some(Author::Sidecar));
    author.filter(|author| of_chain(&rule.chain) != Some(*author))
}

/// Returns whether the rule excludes an interface or concerns the mark for TPROXY, without a jump. Once the
/// installer's chains are gone, such rules can no longer be distinguished from the user's, so they count only
/// beside chains of the installer.
fn is_standalone(rule: &SeenRule, authors: &Authors) -> bool {
    let (family, table) = &rule.table;
    let mut chains = authors.iter();
    IPTABLES_TABLES.contains(&table.as_str())
        && CHAINS_WITH_STANDALONE_RULES.contains(&rule.chain.as_str())
        && (rule.meaning.is_interface_exclusion() || rule.meaning.concerns_tproxy_mark)
        && chains.any(|(((other, _), _), author)| other == family && *author == Author::Sidecar)
}

impl Chain {
    fn describe(&self) -> String {
        let ((family, table), name) = (&self.table, &self.name);
        format!("{family} {table} {name}")
    }
}

impl SeenChain {
    fn holds(&self, rule: &SeenRule) -> bool {
        rule.table == self.table && rule.chain == self.name
    }

    /// Returns how often a rule refers to the chain.
    fn jumps_from(&self, rule: &SeenRule) -> usize {
        let targets = rule.meaning.targets.iter();
        let here = targets.filter(|target| rule.table == self.table && **target == self.name);
        here.count()
    }
}

#[cfg(test)]
pub(crate) mod tests;
