//! Cases that real rules cannot show: hostile sizes, and single expressions.

use super::{
    environment::{self, Environment, Interface},
    ruleset::{Base, Chain, Effect, Family, Hook, Packet, Rule, Table},
    shadow,
    walk::walk,
    *,
};

fn chain(name: &str, base: Option<Base>, rules: Vec<Rule>) -> Chain {
    Chain {
        name: name.to_owned(),
        base,
        rules,
    }
}

fn table(chains: Vec<Chain>) -> Table {
    Table {
        family: Family::Ip,
        name: "theirs".to_owned(),
        handle: 1,
        chains,
    }
}

const RAW: Base = Base {
    is_nat: false,
    hook: Hook::Prerouting,
    priority: -300,
    drops: false,
};

fn always(effect: Effect) -> Rule {
    Rule {
        effects: vec![effect],
        ..Rule::default()
    }
}

fn jump(to: &str) -> Rule {
    Rule {
        is_partial: true,
        ..always(Effect::Jump(to.to_owned()))
    }
}

/// Ten jumps at each of fifteen levels: following all paths would not end.
#[test]
fn a_way_that_multiplies_at_every_jump_is_followed_once() {
    let mut chains = vec![chain("c0", Some(RAW), vec![jump("c1"); 10])];
    for step in 1..15 {
        chains.push(chain(
            &format!("c{step}"),
            None,
            vec![jump(&format!("c{}", step + 1)); 10],
        ));
    }
    chains.push(chain("c15", None, vec![always(Effect::Drop)]));
    let found = shadow::findings(&[table(chains)]);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].subject, "table ip theirs, chain c15");
}

#[test]
fn more_rules_than_the_budget_end_the_look() {
    let rules = vec![Rule::default(); 10];
    let packet = Packet {
        is_dns: false,
        is_new: true,
    };
    let table = table(vec![chain("c0", Some(RAW), rules)]);
    let mut budget = 15;
    for left in [5, 0, 0] {
        assert!(walk(&table, &table.chains[0], packet, &mut budget).reaches_policy);
        assert_eq!(budget, left);
    }
}

#[test]
fn a_chain_that_jumps_to_itself_ends() {
    let chains = vec![
        chain("c0", Some(RAW), vec![jump("c1")]),
        chain("c1", None, vec![jump("c1"), jump("c0"), jump("nowhere")]),
    ];
    assert_eq!(shadow::findings(&[table(chains)]), []);
}

#[test]
fn a_return_ends_a_chain_and_a_goto_does_not_come_back() {
    let to_sub = |effect: fn(String) -> Effect, sub: Vec<Rule>| {
        let base = vec![always(effect("sub".to_owned())), always(Effect::Drop)];
        let chains = vec![chain("c0", Some(RAW), base), chain("sub", None, sub)];
        shadow::findings(&[table(chains)]).len()
    };
    assert_eq!(to_sub(Effect::Jump, vec![always(Effect::Return)]), 1);
    assert_eq!(to_sub(Effect::Jump, vec![always(Effect::Accept)]), 0);
    assert_eq!(to_sub(Effect::Goto, vec![always(Effect::Return)]), 0);
    let returned = vec![always(Effect::Return), always(Effect::Drop)];
    assert_eq!(
        shadow::findings(&[table(vec![chain("c0", Some(RAW), returned)])]),
        []
    );
}

#[test]
fn what_drops_at_a_device_is_ahead_of_everything() {
    let base = Base {
        hook: Hook::Ingress,
        priority: 0,
        ..RAW
    };
    let drop = vec![always(Effect::Drop)];
    let table = Table {
        family: Family::Netdev,
        ..table(vec![chain("in", Some(base), drop)])
    };
    let found = shadow::findings(&[table]);
    assert_eq!((found.len(), found[0].kind), (1, Kind::EarlyVerdict));
}

#[test]
fn questions_for_names_matter_where_ours_lead_them_to_ztunnel() {
    let only_udp = |effect| Rule {
        excludes_tcp: true,
        ..always(effect)
    };
    let base = Base {
        is_nat: true,
        hook: Hook::Output,
        priority: -101,
        drops: false,
    };
    let theirs = table(vec![chain(
        "out",
        Some(base),
        vec![only_udp(Effect::Translate)],
    )]);
    let ours = |rules| Table {
        family: Family::Inet,
        name: "inpod-nat".to_owned(),
        ..table(vec![chain("output", Some(base), rules)])
    };
    let found = |rules| shadow::findings(&[ours(rules), theirs.clone()]).len();
    assert_eq!(found(vec![]), 0);
    assert_eq!(found(vec![only_udp(Effect::Translate)]), 1);
}

fn interface(name: &str) -> Interface {
    Interface {
        name: name.to_owned(),
        index: 1,
        is_up: true,
        is_loopback: name.starts_with("lo"),
        addresses: Vec::new(),
        rp_filter: 0,
        is_without_ipv6: false,
        asymmetric_paths: Vec::new(),
    }
}

fn environment(interfaces: Vec<Interface>) -> Environment {
    Environment {
        interfaces,
        has_ipv6: true,
        routes_ipv6: false,
    }
}

#[test]
fn ipv6_may_be_switched_off_where_it_can_leave_by_another_interface() {
    let without = |name| Interface {
        is_without_ipv6: true,
        ..interface(name)
    };
    let given = ["fd00::1".parse().unwrap()];
    let subjects = |interfaces| {
        let found = environment::findings(&environment(interfaces), &given).into_iter();
        found.map(|finding| finding.subject).collect::<Vec<_>>()
    };
    let one = vec![interface("lo"), interface("eth0"), without("net1")];
    assert_eq!(subjects(one), [""; 0]);
    let all = vec![interface("lo"), without("eth0"), without("net1")];
    let wanted = ["eth0", "net1"].map(|name| format!("net.ipv6.conf.{name}.disable_ipv6"));
    assert_eq!(subjects(all), wanted);
    let inside = vec![without("lo"), interface("eth0")];
    assert_eq!(subjects(inside), ["net.ipv6.conf.lo.disable_ipv6"]);
}

#[test]
fn a_name_that_would_break_a_sentence_is_escaped() {
    let loopback = Interface {
        is_up: false,
        ..interface("lo\n\u{1b}[31m")
    };
    let found = environment::findings(&environment(vec![loopback]), &[]);
    assert_eq!(found[0].subject, "lo\\n\\u{1b}[31m");
}

#[test]
fn a_kernel_without_ipv6_is_told_where_the_pod_was_given_an_address_of_it() {
    let environment = Environment::default();
    assert_eq!(
        environment::findings(&environment, &["10.0.0.1".parse().unwrap()]),
        []
    );
    let found = environment::findings(&environment, &["fd00::1".parse().unwrap()]);
    assert_eq!((found.len(), found[0].kind), (1, Kind::Ipv6Disabled));
    assert!(found[0].sentence.contains("in the kernel"), "{found:?}");
}
