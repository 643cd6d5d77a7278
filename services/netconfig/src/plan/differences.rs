//! Describes the observed state's differences from the desired state, one sentence per difference.

use super::{Plan, State};
use crate::{
    nftables::{Author, Observed, ObservedTable},
    routes::{Item, Routing},
    rules::{Chain, Rule, SCHEMA, Table, TableFamily, Tag},
};

impl Plan {
    pub(crate) fn differences(&self, state: &State) -> Vec<String> {
        let mut differences = self.table_differences(&state.nftables);
        differences.extend(self.leftovers(state));
        differences.extend(self.routing_differences(state));
        if state.migrates == Some(false) {
            differences.push("net.ipv4.tcp_migrate_req is 0".to_owned());
        }
        differences
    }

    pub(crate) fn table_differences(&self, seen: &Observed) -> Vec<String> {
        let mut differences = Vec::new();
        for table in &self.tables {
            differences.extend(self.differences_of(table, seen));
        }
        let belongs = |id| self.tables.iter().any(|table| table.id() == id);
        let stale = seen.tables.iter().map(|found| &found.table);
        let stale = stale.filter(|found| !belongs(found.id()));
        differences.extend(stale.map(|table| format!("table {} is left over", label(table))));
        differences
    }

    /// Compares one of the plan's tables.
    pub(super) fn differences_of(&self, table: &Table, seen: &Observed) -> Vec<String> {
        let mut tables = seen.tables.iter();
        let Some(found) = tables.find(|seen| seen.table.id() == table.id()) else {
            return vec![format!("table {} is missing", label(table))];
        };
        let tag = self.tag_difference(found).into_iter();
        tag.chain(table_differences(table, found)).collect()
    }

    fn leftovers(&self, state: &State) -> Vec<String> {
        let authors = [
            (Author::Agent, "Istio's node agent"),
            (Author::Sidecar, "Istio's sidecar installer"),
            (Author::Inpod, "an earlier inpod"),
        ];
        let replaced = authors
            .into_iter()
            .filter(|(author, _)| self.replaces(*author));
        let left = replaced.filter_map(|(author, who)| {
            let names = state.nftables.leftovers.names(author).join(", ");
            (!names.is_empty()).then(|| format!("{who} left {names}"))
        });
        left.collect()
    }

    fn routing_differences(&self, state: &State) -> Vec<String> {
        let mut differences = self.missing_routing(&state.routing);
        let surplus = self.surplus(state).into_iter();
        differences.extend(surplus.map(|item| format!("the {item} is left over")));
        differences
    }

    pub(crate) fn missing_routing(&self, routing: &Routing) -> Vec<String> {
        match routing.items(&self.routing) {
            Err(blocked) => vec![blocked.to_string()],
            Ok(items) => {
                let missing = items.iter().filter(|item| !routing.has(item));
                missing
                    .map(|item| format!("the {item} is missing"))
                    .collect()
            }
        }
    }

    /// Returns the routing to delete, in order: inpod's superfluous items, and the items of replaced rules.
    pub(crate) fn surplus(&self, state: &State) -> Vec<Item> {
        let mut surplus = Vec::new();
        if state.has_incumbent() {
            surplus.extend(state.routing.agent_items());
        }
        if self.replaces_sidecar() {
            surplus.extend(state.routing.sidecar_items());
        }
        // Without a free table, inpod's items stay until there is one.
        if let Ok(wanted) = state.routing.items(&self.routing) {
            let own = state.own_routing().into_iter();
            surplus.extend(own.filter(|item| !wanted.contains(item)));
        }
        surplus
    }

    fn tag_difference(&self, found: &ObservedTable) -> Option<String> {
        let name = label(&found.table);
        let Some(Tag {
            schema,
            fingerprint,
            ..
        }) = found.tag()
        else {
            return Some(format!("table {name} does not carry inpod's tag"));
        };
        if schema != SCHEMA {
            return Some(format!(
                "table {name} has schema {schema}, expected {SCHEMA}"
            ));
        }
        let wanted = self.fingerprint;
        (fingerprint != wanted)
            .then(|| format!("table {name} has fingerprint {fingerprint}, expected {wanted}"))
    }
}

/// Returns the name of a table, with the family unless the table is dual-stack.
fn label(table: &Table) -> String {
    match table.family {
        TableFamily::Inet => table.name.clone(),
        TableFamily::Ip | TableFamily::Ip6 | TableFamily::Bridge => {
            format!("{} {}", table.family, table.name)
        }
    }
}

fn table_differences(table: &Table, found: &ObservedTable) -> Vec<String> {
    let mut differences = Vec::new();
    let name = label(table);
    if let Some(rules) = found.unread_rules {
        return vec![format!(
            "table {name} holds {rules} rules, which are too many or too large to be inpod's"
        )];
    }
    if found.unknown_objects > 0 {
        let others = found.unknown_objects;
        differences.push(format!(
            "table {name} holds {others} foreign sets or objects"
        ));
    }
    for chain in &table.chains {
        let mut chains = found.table.chains.iter();
        match chains.find(|found| found.name == chain.name) {
            None => differences.push(format!("chain {name} {} is missing", chain.name)),
            Some(found) => differences.extend(chain_differences(&name, chain, found)),
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
        differences.push(format!("chain {name} is {found}, expected {wanted}"));
    }
    let (missing, foreign) = unmatched(&chain.rules, &found.rules);
    if missing.is_empty() && foreign.is_empty() && chain.rules != found.rules {
        differences.push(format!("the rules of chain {name} are in another order"));
    }
    let missing = missing.iter();
    differences.extend(missing.map(|rule| format!("rule `{rule}` is missing in {name}")));
    let foreign = foreign.iter();
    differences.extend(foreign.map(|rule| format!("rule `{rule}` is foreign in {name}")));
    differences
}

/// Returns missing and foreign rules, where a modified rule counts as both.
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
    use crate::{
        family::Family,
        nftables::leftovers::tests::left_by_agent,
        routes::Routing,
        rules::{Ambient, Base, Expr, Form, Policy, Redirection},
    };

    fn plan() -> Plan {
        let ruleset = Redirection::Ambient(Ambient::default()).ruleset();
        Plan::new(Form::Ambient, ruleset.tables, &Family::ALL)
    }

    fn applied(plan: &Plan) -> Vec<ObservedTable> {
        let fingerprint = plan.fingerprint;
        let observed = |table: &Table| ObservedTable {
            table: table.clone(),
            comment: Some(format!(
                "inpod schema=2 fingerprint={fingerprint} sandbox=n/c/e"
            )),
            unknown_objects: 0,
            unread_rules: None,
            uncaptured_udp_flows: 0,
        };
        plan.tables.iter().map(observed).collect()
    }

    fn differences_after(change: impl FnOnce(&mut Vec<ObservedTable>)) -> Vec<String> {
        let plan = plan();
        let mut seen = Observed {
            tables: applied(&plan),
            ..Observed::default()
        };
        change(&mut seen.tables);
        plan.table_differences(&seen)
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
            "table inpod-nat does not carry inpod's tag",
        ];
        assert_eq!(differences, wanted);
    }

    fn state(nftables: Observed) -> State {
        State {
            nftables,
            routing: Routing::default(),
            has_connected: false,
            migrates: Some(true),
            reserved_ports: None,
        }
    }

    #[test]
    fn what_the_incumbent_left_is_named() {
        let differences = plan().leftovers(&state(Observed {
            leftovers: left_by_agent(),
            ..Observed::default()
        }));
        assert_eq!(differences, ["Istio's node agent left ip nat ISTIO_OUTPUT"]);
    }

    #[test]
    fn a_sysctl_that_was_switched_back_is_named() {
        let state = State {
            migrates: Some(false),
            ..state(Observed::default())
        };
        let differences = plan().differences(&state);
        assert!(differences.contains(&"net.ipv4.tcp_migrate_req is 0".to_owned()));
    }
}
