use super::*;
use crate::{rules::Redirection, scenarios};

fn scenario(name: &str) -> Ruleset {
    let mut all = scenarios::sidecar::all();
    let (_, settings) = all.find(|(found, _)| *found == name).unwrap();
    Redirection::Sidecar(settings).ruleset()
}

fn chain(ruleset: &Ruleset, table: &str, chain: &str) -> Vec<String> {
    let tables = ruleset.tables.iter().filter(|found| found.name == table);
    let chains = tables.flat_map(|table| &table.chains);
    let chains = chains.filter(|found| found.name == chain);
    let rules = chains.flat_map(|chain| &chain.rules);
    rules.map(ToString::to_string).collect()
}

#[test]
fn names_of_scenarios_are_distinct_and_every_one_has_another_ruleset() {
    let all: Vec<_> = scenarios::sidecar::all().collect();
    for (at, (name, settings)) in all.iter().enumerate() {
        for (other, others) in &all[..at] {
            assert_ne!(name, other);
            assert_ne!(ruleset(settings), ruleset(others), "{name} {other}");
        }
    }
}

#[test]
fn every_user_and_group_of_the_proxy_is_spared_before_what_the_pod_says_to_itself() {
    let output = chain(&scenario("uid-gid"), NAT, "output");
    let at = |text: &str| {
        let found = output.iter().position(|rule| rule == text);
        found.unwrap_or_else(|| panic!("{text}: {output:#?}"))
    };
    let own = at("oifname \"lo\" counter accept");
    for owner in ["skuid 3", "skuid 4", "skgid 1", "skgid 2"] {
        assert!(at(&format!("meta {owner} counter accept")) < own, "{owner}");
    }
}

#[test]
fn port_15008_is_not_captured_by_tproxy_either() {
    let prerouting = chain(&scenario("tproxy"), MANGLE, "prerouting");
    let spared = "meta l4proto tcp th dport 15008 counter accept".to_owned();
    assert!(prerouting.contains(&spared), "{prerouting:#?}");
}

#[test]
fn where_one_family_is_captured_every_rule_is_of_it() {
    for name in ["ipv4-alone", "ipv4-alone-tproxy"] {
        for table in scenario(name).tables {
            for rule in table.chains.iter().flat_map(|chain| &chain.rules) {
                let family = rule.0.iter().find_map(Expr::family);
                assert_eq!(family, Some(Family::V4), "{rule}");
            }
        }
    }
}

#[test]
fn port_15008_among_those_that_are_captured_is_left_out() {
    let settings = Sidecar {
        inbound_ports: Selection::These(vec![15008.try_into().unwrap(), 80.try_into().unwrap()]),
        ..scenarios::sidecar::usual()
    };
    let prerouting = chain(&ruleset(&settings), NAT, "prerouting");
    assert_eq!(
        prerouting,
        ["meta l4proto tcp th dport 80 counter redirect to :15006"]
    );
}

#[test]
fn where_no_groups_traffic_is_captured_that_of_the_proxy_to_the_pod_is() {
    let settings = Sidecar {
        owner_groups: Some(Vec::new()),
        ..scenarios::sidecar::usual()
    };
    let output = chain(&ruleset(&settings), NAT, "output");
    assert!(!output.is_empty());
    assert!(
        !output.iter().any(|rule| rule.contains(":15001")),
        "{output:#?}"
    );
}

#[test]
fn no_dns_query_is_captured_where_port_53_is_excluded() {
    let settings = Sidecar {
        dns: Selection::All,
        ..Sidecar::default()
    };
    assert_eq!(dns_families(&settings), Family::ALL);
    let excluded = Sidecar {
        excluded_outbound_ports: vec![53.try_into().unwrap()],
        ..settings
    };
    assert_eq!(dns_families(&excluded), []);
}
