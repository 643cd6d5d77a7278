use super::{
    layout::{
        INCUMBENT_CHAINS, IstioChain, PREFIX, SIDECAR_CHAIN, TABLES, base_of, chain_order,
        from_iptables_chain, parent_chain, table_family, to_iptables_chain,
    },
    lift::lift,
    save::{SavedRule, SavedTable},
    sidecar,
};
use crate::{
    backend::{Jump, Observed, ObservedTable},
    family::Family,
    rules::{Chain, Table, TableFamily},
};

/// Takes saved tables of each family, IPv4 first.
pub(super) fn observe(saved: &[(Family, Vec<SavedTable>)]) -> Observed {
    let mut observed = Observed::default();
    for (family, tables) in saved {
        let has_sidecars = tables.iter().any(|table| {
            let incumbent = incumbent_chains(table, tables);
            !sidecar::chains(table, &incumbent).is_empty()
        });
        for (name, ours) in TABLES {
            if let Some(table) = tables.iter().find(|table| table.name == name) {
                let seen = TableContext {
                    table,
                    family: table_family(*family),
                    ours,
                    incumbent: incumbent_chains(table, tables),
                };
                seen.record(&mut observed, has_sidecars);
            }
        }
    }
    observed
}

struct TableContext<'a> {
    table: &'a SavedTable,
    family: TableFamily,
    /// inpod's table that is stored in it.
    ours: &'static str,
    incumbent: Vec<&'a str>,
}

impl TableContext<'_> {
    fn record(&self, observed: &mut Observed, has_sidecars: bool) {
        let tables = our_table(self.table, self.family, self.ours);
        observed.tables.extend(tables);
        let sidecar = sidecar::chains(self.table, &self.incumbent);
        let theirs = [self.incumbent.as_slice(), sidecar.as_slice()].concat();
        let standalone = sidecar::standalone_rules(self.table).filter(|_| has_sidecars);
        observed.jumps.extend(self.jumps(&theirs));
        observed.jumps.extend(standalone.map(|rule| Jump {
            to: String::new(),
            ..self.jump(rule)
        }));
        observed.incumbent.extend(self.names(&self.incumbent));
        observed.sidecar.extend(self.names(&sidecar));
    }

    fn names(&self, chains: &[&str]) -> impl Iterator<Item = String> {
        chains.iter().map(|chain| {
            let incumbent = IstioChain {
                family: self.family,
                table: self.table.name.clone(),
                chain: (*chain).to_owned(),
            };
            incumbent.to_string()
        })
    }

    /// Returns jumps from foreign chains to those of inpod or Istio, deleted with them.
    fn jumps(&self, theirs: &[&str]) -> impl Iterator<Item = Jump> {
        let is_theirs = |rule: &&SavedRule| {
            let target = rule.target().filter(|target| theirs.contains(target));
            target.is_some() && !theirs.contains(&rule.chain.as_str())
        };
        let leading = self.table.rules.iter().filter(is_theirs);
        let leading = jumps_to_ours(self.table).chain(leading);
        leading.map(|rule| self.jump(rule))
    }

    fn jump(&self, rule: &SavedRule) -> Jump {
        Jump {
            table: (self.family, self.ours.to_owned()),
            to: rule.target().unwrap_or_default().to_owned(),
            rule: rule.text.clone(),
        }
    }
}

fn our_table(saved: &SavedTable, family: TableFamily, ours: &str) -> Option<ObservedTable> {
    let names = saved
        .chains
        .iter()
        .filter(|chain| chain.starts_with(PREFIX));
    let mut chains: Vec<_> = names.map(|name| lift_chain(saved, ours, name)).collect();
    if chains.is_empty() {
        return None;
    }
    chains.sort_by_key(|chain| (chain_order(&chain.name), chain.name.clone()));
    let entered = chains.iter().filter(|chain| chain.base.is_some()).count();
    let surplus = jumps_to_ours(saved).count().saturating_sub(entered);
    Some(ObservedTable {
        comment: comment_of(saved, &chains),
        table: Table {
            family,
            name: ours.to_owned(),
            chains,
        },
        unknown_objects: u32::try_from(surplus).unwrap_or(u32::MAX),
    })
}

fn lift_chain(saved: &SavedTable, ours: &str, chain: &str) -> Chain {
    let rules = saved.rules.iter().filter(|rule| rule.chain == chain);
    let name = from_iptables_chain(chain).to_owned();
    let base = entry_jump(saved, &name).and_then(|_| base_of(ours, &name));
    Chain {
        base,
        rules: rules.map(|rule| lift(&rule.tokens)).collect(),
        name,
    }
}

/// Returns the jump if it is the only one and from the right chain.
fn entry_jump<'a>(saved: &'a SavedTable, name: &str) -> Option<&'a SavedRule> {
    let (chain, origin) = (to_iptables_chain(name), parent_chain(name)?);
    let mut jumps = jumps_to_ours(saved).filter(|jump| jump.target() == Some(chain));
    let jump = jumps.next().filter(|jump| jump.chain == origin)?;
    (jumps.next().is_none() && (is_bare(jump) || comment_in(jump).is_some())).then_some(jump)
}

fn jumps_to_ours(saved: &SavedTable) -> impl Iterator<Item = &SavedRule> {
    let leads_to_ours = |rule: &&SavedRule| {
        let target = rule.target();
        !rule.chain.starts_with(PREFIX) && target.is_some_and(|chain| chain.starts_with(PREFIX))
    };
    saved.rules.iter().filter(leads_to_ours)
}

/// Returns the tag if all jumps carry the same.
fn comment_of(saved: &SavedTable, chains: &[Chain]) -> Option<String> {
    let jumps = chains
        .iter()
        .filter_map(|chain| entry_jump(saved, &chain.name));
    let mut comments = jumps.map(comment_in);
    let first = comments.next()??;
    comments
        .all(|comment| comment == Some(first))
        .then(|| first.to_owned())
}

/// Returns the comment unless there are other conditions.
fn comment_in(jump: &SavedRule) -> Option<&str> {
    let tokens: Vec<_> = jump.tokens.iter().map(String::as_str).collect();
    match tokens.as_slice() {
        ["-m", "comment", "--comment", comment, "-j", _] => Some(comment),
        _ => None,
    }
}

fn is_bare(jump: &SavedRule) -> bool {
    matches!(jump.tokens.as_slice(), [token, _] if token == "-j")
}

/// A sidecar has a chain of the same name, among others.
fn incumbent_chains<'a>(saved: &'a SavedTable, tables: &[SavedTable]) -> Vec<&'a str> {
    let [prerouting, _] = INCUMBENT_CHAINS;
    let has = |table: &SavedTable, name: &str| table.chains.iter().any(|chain| chain == name);
    let is_sidecars = tables.iter().any(|table| has(table, SIDECAR_CHAIN));
    if is_sidecars && !has(saved, prerouting) {
        return Vec::new();
    }
    let chains = saved.chains.iter().map(String::as_str);
    chains
        .filter(|chain| INCUMBENT_CHAINS.contains(chain))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::iptables::save::parse;

    fn observed(nat: &str) -> Observed {
        let saved = parse(&format!("*nat\n{nat}\nCOMMIT\n")).unwrap();
        observe(&[(Family::V4, saved)])
    }

    const CHAINS: &str = ":PREROUTING ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n\
        :INPOD_OUTPUT - [0:0]\n:INPOD_PREROUTING - [0:0]\n\
        -A PREROUTING -m comment --comment \"a tag\" -j INPOD_PREROUTING\n";

    const JUMP: &str = "-A OUTPUT -m comment --comment \"a tag\" -j INPOD_OUTPUT\n";

    /// Returns whether output is entered, the tag, and the number of superfluous jumps.
    fn entered(jumps: &str) -> (bool, Option<String>, u32) {
        let observed = observed(&format!("{CHAINS}{jumps}"));
        let [nat] = observed.tables.as_slice() else {
            panic!("{observed:?}");
        };
        assert_eq!(nat.table.chains[0].name, "prerouting");
        assert!(nat.table.chains[0].base.is_some());
        let output = &nat.table.chains[1];
        assert_eq!(output.name, "output");
        (
            output.base.is_some(),
            nat.comment.clone(),
            nat.unknown_objects,
        )
    }

    #[test]
    fn a_chain_is_entered_by_the_one_jump_and_by_nothing_else() {
        let tag = || Some("a tag".to_owned());
        assert_eq!(entered(JUMP), (true, tag(), 0));
        assert_eq!(entered(""), (false, tag(), 0));
        assert_eq!(entered(&format!("{JUMP}{JUMP}")), (false, tag(), 2));
        let elsewhere = JUMP.replace("-A OUTPUT", "-A INPUT");
        assert_eq!(entered(&elsewhere), (false, tag(), 1));
        let narrowed = JUMP.replace("-m", "-p tcp -m");
        assert_eq!(entered(&narrowed), (false, tag(), 1));
        let other = JUMP.replace("a tag", "another");
        assert_eq!(entered(&other), (true, None, 0));
        let untagged = "-A OUTPUT -j INPOD_OUTPUT";
        assert_eq!(entered(untagged), (true, None, 0));
        let outgoing = format!("{JUMP}-A INPOD_OUTPUT -j INPOD_PREROUTING");
        assert_eq!(entered(&outgoing), (true, tag(), 0));
    }

    #[test]
    fn a_chain_of_another_release_is_part_of_the_table() {
        let observed = observed(&format!("{CHAINS}:INPOD_OLD - [0:0]\n-A INPOD_OLD -j DROP"));
        let chains = &observed.tables[0].table.chains;
        let names: Vec<_> = chains.iter().map(|chain| chain.name.as_str()).collect();
        assert_eq!(names, ["prerouting", "output", "INPOD_OLD"]);
    }

    #[test]
    fn the_incumbents_chains_and_the_jumps_to_them_are_seen() {
        let observed = observed(
            ":OUTPUT ACCEPT [0:0]\n:ISTIO_PRERT - [0:0]\n:ISTIO_OUTPUT - [0:0]\n\
             -A PREROUTING -j ISTIO_PRERT\n-A OUTPUT -j ISTIO_OUTPUT\n-A ISTIO_OUTPUT -j ACCEPT",
        );
        assert_eq!(observed.tables, []);
        assert_eq!(
            observed.incumbent,
            ["ip nat ISTIO_PRERT", "ip nat ISTIO_OUTPUT"]
        );
        let jumps: Vec<_> = observed
            .jumps
            .iter()
            .map(|jump| jump.rule.as_str())
            .collect();
        assert_eq!(
            jumps,
            ["PREROUTING -j ISTIO_PRERT", "OUTPUT -j ISTIO_OUTPUT"]
        );
        let parsed: IstioChain = observed.incumbent[0].parse().unwrap();
        assert_eq!(parsed.to_string(), observed.incumbent[0]);
    }

    #[test]
    fn a_sidecars_chains_are_not_the_incumbents() {
        let sidecar = ":ISTIO_REDIRECT - [0:0]\n:ISTIO_OUTPUT - [0:0]\n-A OUTPUT -j ISTIO_OUTPUT\n\
            -A ISTIO_OUTPUT -j ISTIO_REDIRECT";
        let observed = observed(sidecar);
        assert_eq!((observed.tables, observed.incumbent), (vec![], vec![]));
        assert_eq!(
            observed.sidecar,
            ["ip nat ISTIO_REDIRECT", "ip nat ISTIO_OUTPUT"]
        );
    }
}
