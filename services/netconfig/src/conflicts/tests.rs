//! Cases that the tests' kernel cannot show.

use super::{
    environment::{self, Environment, Interface},
    *,
};

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
