//! What belongs in a netns, and how what is there differs from it. Pure.

use crate::{
    link::State,
    nftables::ObservedTable,
    routes::{Family, Item, ORDER},
    rules::{Chain, Fingerprint, Rule, Ruleset, SCHEMA, Table, Tag},
};

/// What belongs in a netns.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) ruleset: Ruleset,
    pub(crate) fingerprint: Fingerprint,
    /// In the order in which they are added.
    pub(crate) routing: Vec<Item>,
}

impl Plan {
    /// The rules of a set, and the routes that they need in a netns with or without IPv6.
    pub(crate) fn new(ruleset: Ruleset, has_ipv6: bool) -> Self {
        let families = Family::ALL.into_iter();
        let families = families.filter(|family| has_ipv6 || *family != Family::V6);
        let items = |part| families.clone().map(move |family| (family, part));
        Self {
            fingerprint: ruleset.fingerprint(),
            ruleset,
            routing: ORDER.into_iter().flat_map(items).collect(),
        }
    }

    /// One sentence per difference; empty where everything is as it belongs.
    pub(crate) fn differences(&self, state: &State) -> Vec<String> {
        let mut differences = self.filter_differences(&state.filter.tables);
        let missing = self
            .routing
            .iter()
            .filter(|item| !state.routing.has(**item));
        differences.extend(missing.map(|(family, part)| format!("the {family} {part} is missing")));
        differences
    }

    /// The same of the tables alone.
    pub(crate) fn filter_differences(&self, found: &[ObservedTable]) -> Vec<String> {
        let mut differences = Vec::new();
        for table in &self.ruleset.tables {
            match found.iter().find(|found| found.table.name == table.name) {
                None => differences.push(format!("table {} is missing", table.name)),
                Some(found) => {
                    differences.extend(self.tag_difference(found));
                    differences.extend(table_differences(table, found));
                }
            }
        }
        let belongs = |name: &str| self.ruleset.tables.iter().any(|table| table.name == name);
        let stale = found.iter().filter(|found| !belongs(&found.table.name));
        differences.extend(stale.map(|found| format!("table {} is left over", found.table.name)));
        differences
    }

    fn tag_difference(&self, found: &ObservedTable) -> Option<String> {
        let name = &found.table.name;
        let Some(Tag {
            schema,
            fingerprint,
            ..
        }) = found.tag()
        else {
            return Some(format!("table {name} does not bear inpod's tag"));
        };
        if schema != SCHEMA {
            return Some(format!("table {name} is of schema {schema}, not {SCHEMA}"));
        }
        let wanted = self.fingerprint;
        (fingerprint != wanted)
            .then(|| format!("table {name} bears the fingerprint {fingerprint}, not {wanted}"))
    }
}

fn table_differences(table: &Table, found: &ObservedTable) -> Vec<String> {
    let mut differences = Vec::new();
    let name = &table.name;
    if found.others > 0 {
        let others = found.others;
        differences.push(format!(
            "table {name} holds {others} foreign sets or objects"
        ));
    }
    for chain in &table.chains {
        let found = found
            .table
            .chains
            .iter()
            .find(|found| found.name == chain.name);
        match found {
            None => differences.push(format!("chain {name} {} is missing", chain.name)),
            Some(found) => differences.extend(chain_differences(name, chain, found)),
        }
    }
    let belongs = |found: &Chain| table.chains.iter().any(|chain| chain.name == found.name);
    let foreign = found.table.chains.iter().filter(|found| !belongs(found));
    differences.extend(foreign.map(|found| format!("chain {name} {} is foreign", found.name)));
    differences
}

fn chain_differences(table: &str, chain: &Chain, found: &Chain) -> Vec<String> {
    let name = format!("{table} {}", chain.name);
    let mut differences = Vec::new();
    if chain.base != found.base {
        let base = |chain: &Chain| {
            let base = chain.base.as_ref();
            base.map_or_else(|| "no base chain".to_owned(), |base| format!("`{base}`"))
        };
        let (wanted, found) = (base(chain), base(found));
        differences.push(format!("chain {name} is {found}, not {wanted}"));
    }
    let (missing, foreign) = unmatched(&chain.rules, &found.rules);
    if missing.is_empty() && foreign.is_empty() && chain.rules != found.rules {
        differences.push(format!("the rules of chain {name} are in another order"));
    }
    differences.extend(
        missing
            .iter()
            .map(|rule| format!("rule `{rule}` is missing in {name}")),
    );
    differences.extend(
        foreign
            .iter()
            .map(|rule| format!("rule `{rule}` is foreign in {name}")),
    );
    differences
}

/// The rules that are missing, and those that are too much. A changed rule is one of each.
fn unmatched<'a>(wanted: &'a [Rule], found: &'a [Rule]) -> (Vec<&'a Rule>, Vec<&'a Rule>) {
    let mut left: Vec<_> = found.iter().collect();
    let mut missing = Vec::new();
    for rule in wanted {
        match left.iter().position(|found| *found == rule) {
            Some(at) => drop(left.remove(at)),
            None => missing.push(rule),
        }
    }
    (missing, left)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::{Base, Expr, Policy, Redirection};

    fn plan() -> Plan {
        Plan::new(Redirection::Ambient.ruleset(), true)
    }

    /// The tables as they are after an apply.
    fn applied(plan: &Plan) -> Vec<ObservedTable> {
        let fingerprint = plan.fingerprint;
        let observed = |table: &Table| ObservedTable {
            table: table.clone(),
            comment: Some(format!(
                "inpod schema=1 fingerprint={fingerprint} sandbox=n/c/e"
            )),
            others: 0,
        };
        plan.ruleset.tables.iter().map(observed).collect()
    }

    fn differences_after(change: impl FnOnce(&mut Vec<ObservedTable>)) -> Vec<String> {
        let plan = plan();
        let mut found = applied(&plan);
        change(&mut found);
        plan.filter_differences(&found)
    }

    #[test]
    fn what_was_applied_does_not_differ() {
        assert_eq!(differences_after(|_| ()), [""; 0]);
    }

    #[test]
    fn a_missing_rule_is_named() {
        let differences = differences_after(|found| drop(found[1].table.chains[1].rules.remove(0)));
        let rule = "meta l4proto tcp meta mark & 0xfff == 0x111 counter accept";
        assert_eq!(
            differences,
            [format!("rule `{rule}` is missing in inpod-nat output")]
        );
    }

    #[test]
    fn a_foreign_rule_is_named() {
        let rule = Rule(vec![Expr::Counter]);
        let differences = differences_after(|found| found[1].table.chains[0].rules.push(rule));
        assert_eq!(
            differences,
            ["rule `counter` is foreign in inpod-nat prerouting"]
        );
    }

    #[test]
    fn another_order_is_a_difference() {
        let differences = differences_after(|found| found[1].table.chains[1].rules.swap(1, 2));
        assert_eq!(
            differences,
            ["the rules of chain inpod-nat output are in another order"]
        );
    }

    #[test]
    fn a_changed_policy_is_named() {
        let differences = differences_after(|found| {
            let base = found[0].table.chains[0].base.unwrap();
            let policy = Policy::Drop;
            found[0].table.chains[0].base = Some(Base { policy, ..base });
        });
        assert_eq!(differences.len(), 1);
        assert!(differences[0].contains("policy drop"), "{differences:?}");
    }

    #[test]
    fn a_missing_table_and_a_foreign_tag_are_named() {
        let differences = differences_after(|found| {
            found.remove(0);
            found[0].comment = Some("mine".into());
        });
        let wanted = [
            "table inpod-mangle is missing",
            "table inpod-nat does not bear inpod's tag",
        ];
        assert_eq!(differences, wanted);
    }

    #[test]
    fn without_ipv6_only_ipv4_is_routed() {
        let plan = Plan::new(Redirection::Ambient.ruleset(), false);
        assert!(plan.routing.iter().all(|(family, _)| *family == Family::V4));
        assert_eq!(plan.routing.len(), 2);
    }
}
