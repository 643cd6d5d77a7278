//! Cases that real rules cannot show: hostile sizes, and single expressions.

use super::{
    environment::{self, Environment, Interface},
    op::{MarkOf, Op, Source, Verdict, Writes},
    packet::{Effect, Packet, evaluate},
    ruleset::{Base, Chain, Family, Hook, Table},
    shadow,
    walk::walk,
    *,
};

const TCP: Packet = Packet {
    is_ipv6: false,
    protocol: 6,
    port: None,
    is_new: true,
};

fn load(source: Source) -> Op {
    Op::Load {
        to: 0,
        words: 1,
        source,
    }
}

fn compare(equal: bool, data: &[u8]) -> Op {
    Op::Compare {
        slot: 0,
        equal,
        data: data.to_vec(),
    }
}

/// Returns whether a packet reaches the rule's end; `None` if it may.
fn meets(rule: &[Op], packet: Packet) -> Option<bool> {
    let rule = [rule, &[Op::Untrack]].concat();
    let outcome = evaluate(&rule, packet);
    match (outcome.effects.is_empty(), outcome.is_certain) {
        (true, _) => Some(false),
        (false, true) => Some(true),
        (false, false) => None,
    }
}

#[test]
fn what_is_known_of_a_packet_decides_and_the_rest_may_be() {
    let v6 = Packet {
        is_ipv6: true,
        ..TCP
    };
    let old = Packet {
        is_new: false,
        ..TCP
    };
    let new = 8_u32.to_ne_bytes();
    for (source, data, packet, wanted) in [
        (Source::Protocol, &[6][..], TCP, Some(true)),
        (Source::Protocol, &[17], TCP, Some(false)),
        (Source::Family, &[2], TCP, Some(true)),
        (Source::Family, &[2], v6, Some(false)),
        (Source::EtherType, &[0x86, 0xdd], v6, Some(true)),
        (Source::EtherType, &[0x86, 0xdd], TCP, Some(false)),
        (
            Source::HeaderProtocol { is_ipv6: false },
            &[17],
            TCP,
            Some(false),
        ),
        (Source::HeaderProtocol { is_ipv6: false }, &[17], v6, None),
        (Source::Port, &[0, 80], TCP, None),
        (Source::State, &new, TCP, Some(true)),
        (Source::State, &new, old, None),
        (
            Source::Destination { is_ipv6: false },
            &[127],
            TCP,
            Some(false),
        ),
        (
            Source::Destination { is_ipv6: false },
            &[127, 0, 0, 11],
            TCP,
            Some(false),
        ),
        (
            Source::Destination { is_ipv6: false },
            &[10, 0, 0, 1],
            TCP,
            None,
        ),
        (Source::Mark(MarkOf::Packet), &[0, 0, 0, 0], TCP, None),
        (Source::Other, &[6], TCP, None),
    ] {
        let rule = |equal| [load(source), compare(equal, data)];
        assert_eq!(meets(&rule(true), packet), wanted, "{source:?} {data:?}");
        let opposite = wanted.map(|wanted| !wanted);
        assert_eq!(
            meets(&rule(false), packet),
            opposite,
            "{source:?} not {data:?}"
        );
    }
}

#[test]
fn a_state_that_no_first_packet_has_is_not_met() {
    let state = |mask, inverted| [Op::State { mask, inverted }];
    assert_eq!(meets(&state(8 | 2, false), TCP), Some(true));
    assert_eq!(meets(&state(1, false), TCP), Some(false));
    assert_eq!(meets(&state(1, true), TCP), Some(true));
    let old = Packet {
        is_new: false,
        ..TCP
    };
    assert_eq!(meets(&state(1, false), old), None);
}

fn writes(rule: &[Op], of: MarkOf) -> bool {
    let rule = [rule, &[Op::WriteMark { of, from: 0 }]].concat();
    evaluate(&rule, TCP).effects.contains(&Effect::Mark(of))
}

fn mask(from: usize, mask: u32, xor: u32) -> Op {
    Op::Mask {
        from,
        to: 0,
        mask: mask.to_ne_bytes().into(),
        xor: xor.to_ne_bytes().into(),
    }
}

#[test]
fn a_mark_that_is_written_back_is_judged_by_all_that_was_done_to_it() {
    let own = load(Source::Mark(MarkOf::Packet));
    let is_harmless =
        |ops: &[Op]| !writes(&[std::slice::from_ref(&own), ops].concat(), MarkOf::Packet);
    assert!(is_harmless(&[]));
    assert!(is_harmless(&[mask(0, 0xfff, 0x1000)]));
    assert!(is_harmless(&[mask(0, 0xffff, 0), mask(0, 0xfff, 0xf000)]));
    assert!(!is_harmless(&[mask(0, 0xffe, 0)]));
    assert!(!is_harmless(&[mask(0, u32::MAX, 1)]));
    assert!(!is_harmless(&[mask(0, 0xff0, 0), mask(0, 0xfff, 0)]));
    // Another register, another mark, and an unknown expression in between.
    assert!(!is_harmless(&[mask(4, 0xfff, 0)]));
    assert!(writes(std::slice::from_ref(&own), MarkOf::Connection));
    assert!(!is_harmless(&[Op::Maybe(Writes::Any)]));
    assert!(!is_harmless(&[Op::Maybe(Writes::One(0))]));
    assert!(is_harmless(&[Op::Maybe(Writes::Nothing)]));
    assert!(!is_harmless(&[Op::Set {
        to: 0,
        data: vec![5, 0, 0, 0]
    }]));
    // A register of 16 bytes beginning before.
    let long = |words| Op::Load {
        to: 0,
        words,
        source: Source::Other,
    };
    let moved = Op::Load {
        to: 1,
        words: 1,
        source: Source::Mark(MarkOf::Packet),
    };
    assert!(writes(
        &[moved.clone(), long(4), mask(1, u32::MAX, 0)],
        MarkOf::Packet
    ));
    assert!(!writes(
        &[moved, long(1), mask(1, u32::MAX, 0)],
        MarkOf::Packet
    ));
}

fn chain(name: &str, base: Option<Base>, rules: Vec<Vec<Op>>) -> Chain {
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

fn jump(to: &str) -> Vec<Op> {
    vec![
        Op::Maybe(Writes::Nothing),
        Op::Verdict(Verdict::Jump(to.to_owned())),
    ]
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
    chains.push(chain("c15", None, vec![vec![Op::Verdict(Verdict::Drop)]]));
    let found = shadow::findings(&[table(chains)]);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].subject, "table ip theirs, chain c15");
}

#[test]
fn more_rules_than_the_budget_end_the_look() {
    let rules = vec![vec![Op::Pass]; 10];
    let table = table(vec![chain("c0", Some(RAW), rules)]);
    let mut budget = 15;
    for left in [5, 0, 0] {
        assert!(walk(&table, &table.chains[0], TCP, &mut budget).reaches_policy);
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
    let decide = |verdict| vec![Op::Verdict(verdict)];
    let to_sub = |verdict: fn(String) -> Verdict, sub: Vec<Vec<Op>>| {
        let base = vec![decide(verdict("sub".to_owned())), decide(Verdict::Drop)];
        let chains = vec![chain("c0", Some(RAW), base), chain("sub", None, sub)];
        shadow::findings(&[table(chains)]).len()
    };
    assert_eq!(to_sub(Verdict::Jump, vec![decide(Verdict::Return)]), 1);
    assert_eq!(to_sub(Verdict::Jump, vec![decide(Verdict::Accept)]), 0);
    assert_eq!(to_sub(Verdict::Goto, vec![decide(Verdict::Return)]), 0);
    let returned = vec![decide(Verdict::Return), decide(Verdict::Drop)];
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
    let drop = vec![vec![Op::Verdict(Verdict::Drop)]];
    let table = Table {
        family: Family::Netdev,
        ..table(vec![chain("in", Some(base), drop)])
    };
    let found = shadow::findings(&[table]);
    assert_eq!((found.len(), found[0].kind), (1, Kind::EarlyVerdict));
}

#[test]
fn questions_for_names_matter_where_ours_lead_them_to_ztunnel() {
    let only_udp = |op| vec![load(Source::Protocol), compare(true, &[17]), op];
    let base = Base {
        is_nat: true,
        hook: Hook::Output,
        priority: -101,
        drops: false,
    };
    let theirs = table(vec![chain(
        "out",
        Some(base),
        vec![only_udp(Op::Translate)],
    )]);
    let ours = |rules| Table {
        family: Family::Inet,
        name: "inpod-nat".to_owned(),
        ..table(vec![chain("output", Some(base), rules)])
    };
    let found = |rules| shadow::findings(&[ours(rules), theirs.clone()]).len();
    assert_eq!(found(vec![]), 0);
    assert_eq!(found(vec![only_udp(Op::Translate)]), 1);
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
