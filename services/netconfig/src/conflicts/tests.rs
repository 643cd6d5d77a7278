//! Cases that the tests' kernel cannot show.

use super::{
    environment::{self, Environment, Interface},
    *,
};
use crate::rules::InterfaceName;

fn interface(name: &str) -> Interface {
    Interface {
        name: name.to_owned(),
        index: 1,
        is_up: true,
        is_loopback: name.starts_with("lo"),
        addresses: Vec::new(),
        ipv6_addresses: Vec::new(),
        is_running: true,
        is_bridge: false,
        rp_filter: 0,
        is_without_ipv6: false,
        asymmetric_paths: Vec::new(),
    }
}

fn environment(interfaces: Vec<Interface>) -> Environment {
    Environment {
        interfaces,
        has_ipv6: true,
        ..Environment::default()
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
fn a_bridge_with_containers_is_found_unless_the_annotation_names_it() {
    let bridge = |name| Interface {
        is_bridge: true,
        ..interface(name)
    };
    let pods = Interface {
        addresses: vec!["10.9.0.1".parse().unwrap()],
        ..bridge("eth0")
    };
    let idle = Interface {
        is_running: false,
        ..bridge("docker0")
    };
    let interfaces = vec![
        pods,
        idle,
        bridge("br-1"),
        bridge("br-2"),
        interface("net1"),
    ];
    let environment = environment(interfaces);
    let addresses = ["10.9.0.1".parse().unwrap()];
    let subjects = |covered: &[&str]| {
        let covered: Vec<InterfaceName> = covered.iter().map(|it| it.parse().unwrap()).collect();
        let covered: Vec<_> = covered.iter().collect();
        let found = environment::uncovered_bridges(&environment, &addresses, &covered);
        let subjects = found.into_iter().map(|finding| finding.subject);
        subjects.collect::<Vec<_>>()
    };
    assert_eq!(subjects(&[]), ["interface br-1", "interface br-2"]);
    assert_eq!(subjects(&["br-1"]), ["interface br-2"]);
    assert_eq!(subjects(&["br-*"]), [""; 0]);
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
