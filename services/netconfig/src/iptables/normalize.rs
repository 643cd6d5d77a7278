//! Converts rulesets to the form that iptables stores: one table per family, no redundant conditions.

use super::layout::table_family;
use crate::{
    family::Family,
    rules::{Chain, Expr, Rule, Ruleset, Table},
};

/// Families without any rules have no tables.
pub(super) fn normalize(ruleset: &Ruleset, families: &[Family]) -> Vec<Table> {
    let of_family = |family: &Family| {
        let tables = ruleset.tables.iter();
        let tables: Vec<_> = tables.map(|table| table_of(table, *family)).collect();
        let mut chains = tables.iter().flat_map(|table| &table.chains);
        let has_rules = chains.any(|chain| !chain.rules.is_empty());
        if has_rules { tables } else { Vec::new() }
    };
    families.iter().flat_map(of_family).collect()
}

fn table_of(table: &Table, family: Family) -> Table {
    let chain = |chain: &Chain| Chain {
        name: chain.name.clone(),
        base: chain.base,
        rules: rules_of(&chain.rules, family),
    };
    Table {
        family: table_family(family),
        name: table.name.clone(),
        chains: table.chains.iter().map(chain).collect(),
    }
}

fn rules_of(rules: &[Rule], family: Family) -> Vec<Rule> {
    let mut kept: Vec<Rule> = Vec::new();
    for rule in rules.iter().filter_map(|rule| rule_of(rule, family)) {
        if !kept.last().is_some_and(|last| is_implied(last, &rule)) {
            kept.push(rule);
        }
    }
    kept
}

/// Returns whether the previous rule already drops this: iptables' TPROXY itself drops packets without a
/// socket (tproxy_tg4 in net/netfilter/xt_TPROXY.c).
fn is_implied(before: &Rule, rule: &Rule) -> bool {
    match (before.0.split_last(), rule.0.split_last()) {
        (Some((Expr::Tproxy(..), before)), Some((Expr::Drop, packets))) => before == packets,
        _ => false,
    }
}

/// Returns `None` for the other family.
fn rule_of(rule: &Rule, family: Family) -> Option<Rule> {
    let is_others = |expr: &Expr| family_of(expr).is_some_and(|wanted| wanted != family);
    if rule.0.iter().any(is_others) {
        return None;
    }
    Some(Rule(rule.0.iter().filter_map(normalize_expr).collect()))
}

fn family_of(expr: &Expr) -> Option<Family> {
    if let Expr::Tproxy(family, _, _) = expr {
        *family
    } else {
        expr.family()
    }
}

/// Omits what the table implies, packet counters, and networks of length 0, which are not printed.
fn normalize_expr(expr: &Expr) -> Option<Expr> {
    if let Expr::Tproxy(_, port, mark) = expr {
        return Some(Expr::Tproxy(None, *port, *mark));
    }
    if let Expr::Source(network) | Expr::Destination(network) = expr
        && network.prefix_len() == 0
    {
        return None;
    }
    let is_implied = matches!(expr, Expr::Version(_) | Expr::Counter);
    (!is_implied).then(|| expr.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        iptables::layout::base_of,
        rules::{Ambient, Exclusions, Redirection, TableFamily, ambient, scenarios},
    };

    #[test]
    fn chains_are_entered_where_those_of_iptables_are() {
        for (name, redirection) in scenarios::redirections() {
            for table in &redirection.ruleset().tables {
                for chain in &table.chains {
                    assert_eq!(base_of(&table.name, &chain.name), chain.base, "{name}");
                }
            }
        }
    }

    #[test]
    fn a_family_that_is_not_captured_has_no_tables() {
        let mut scenarios = scenarios::all();
        let (_, ipv4) = scenarios.find(|(name, _)| *name == "ipv4").unwrap();
        let tables = normalize(&Redirection::Ambient(ipv4).ruleset(), &Family::ALL);
        let families: Vec<_> = tables.iter().map(|table| table.family).collect();
        assert_eq!(families, [TableFamily::Ip; 2]);
    }

    #[test]
    fn what_takes_the_place_of_capture_is_there_for_both_families() {
        assert_eq!(normalize(&ambient::drain(), &Family::ALL).len(), 4);
        assert_eq!(normalize(&ambient::drain(), &[Family::V4]).len(), 2);
    }

    #[test]
    fn a_network_that_is_everything_is_no_condition() {
        let settings = Ambient {
            exclusions: Exclusions {
                outbound_networks: vec!["0.0.0.0/0".parse().unwrap()],
                ..Exclusions::default()
            },
            ..Ambient::default()
        };
        let tables = normalize(&Redirection::Ambient(settings).ruleset(), &[Family::V4]);
        let output = &tables[1].chains[1].rules;
        let spared = Rule(vec![
            Expr::Protocol(crate::rules::Transport::Tcp),
            Expr::Accept,
        ]);
        assert!(output.contains(&spared), "{output:?}");
    }

    #[test]
    fn what_tproxy_drops_itself_is_not_dropped_again() {
        let mut scenarios = scenarios::all();
        let (_, tproxy) = scenarios.find(|(name, _)| *name == "tproxy").unwrap();
        let tables = normalize(&Redirection::Ambient(tproxy).ruleset(), &Family::ALL);
        let text: String = tables.iter().map(ToString::to_string).collect();
        assert!(text.contains("tproxy to :15008"), "{text}");
        assert!(!text.contains("drop"), "{text}");
    }
}
