//! `decide::tests::oracle` compares the redirections of random annotations with the reference; these tests cover what
//! the oracle leaves out.

use super::*;
use crate::{redirection::Ipv6, testing::capture};

#[test]
fn the_proxy_and_the_node_say_the_rest() {
    let proxy = Proxy {
        uid: 2000,
        gid: 3000,
        dns: true,
        drop_invalid: true,
    };
    let node = Capture {
        ipv6: Ipv6::Off,
        owner_groups: "202,888".parse().unwrap(),
        excluded_owner_groups: vec!["7".parse().unwrap()],
        loopback: "127.0.0.1/30".parse().unwrap(),
        ..capture()
    };
    let redirection = Sidecar::from_annotations(proxy, |_| None)
        .unwrap()
        .to_wire(&node);
    assert_eq!(
        (redirection.proxy_uids, redirection.proxy_gids),
        (vec![2000], vec![3000])
    );
    assert_eq!(
        redirection.dns.map(|dns| (dns.all, dns.servers)),
        Some((true, Vec::new()))
    );
    assert!(redirection.drop_invalid);
    assert_eq!(redirection.ipv6, i32::from(wire::Ipv6Capture::Off));
    assert_eq!(redirection.owner_groups.unwrap().groups, [202, 888]);
    assert_eq!(redirection.excluded_owner_groups, [7]);
    assert_eq!(redirection.loopback_network, "127.0.0.0/30");
}

#[test]
fn a_malformed_annotation_is_refused_with_what_to_do() {
    let proxy = Proxy {
        uid: 1337,
        gid: 1337,
        dns: false,
        drop_invalid: false,
    };
    for (annotation, text) in [
        (keys::INTERCEPTION_MODE, "BOTH"),
        (keys::SIDECAR_EXCLUDE_INBOUND_PORTS, "http"),
    ] {
        let error = Sidecar::from_annotations(proxy, |name| (name == annotation).then_some(text));
        let error = error.unwrap_err();
        assert_eq!(error.annotation, annotation);
        assert!(error.why.contains("; give "), "{error}");
    }
}
