//! Findings about interfaces and sysctls.

use netconfig::conflicts::{Kind, find_conflicts};

use crate::look::{
    FROM_ZTUNNEL, POD, SERVER, address, arrives, capture, connect, dial, is_clean, is_found,
    listen, pod, sysctl,
};
use crate::support::Fresh;

#[test]
fn a_loopback_that_is_down_is_told_and_captures_nothing() {
    let (pod, _server) = pod();
    let outbound = listen(&pod, 15001);
    pod.ip("link set lo down");
    is_found(&pod, Kind::LoopbackDown, "lo", "is down");
    assert!(dial(&pod, None, 0, address(SERVER, 8080)).is_none());
    pod.ip("link set lo up");
    capture(&pod);
    is_clean(&pod);
    let captured = dial(&pod, None, 0, address(SERVER, 8080)).unwrap();
    assert!(arrives(&outbound, &captured));
}

#[test]
fn strict_reverse_path_filtering_is_told_where_answers_leave_by_another_interface() {
    let (pod, server) = pod();
    let inbound = listen(&pod, 15006);
    connect(&pod, &server, "net1", ["10.8.0.1", "10.8.0.2"]);
    server.ip("addr add 203.0.113.5/32 dev lo");
    // Replies to the second interface leave by the first one.
    let dial = || dial(&server, Some("203.0.113.5"), 0, address("10.8.0.1", 8080));
    sysctl(&pod, "ipv4/conf/eth0/rp_filter", "1");
    is_clean(&pod);
    assert!(arrives(&inbound, &dial().unwrap()));
    for path in ["ipv4/conf/net1/rp_filter", "ipv4/conf/all/rp_filter"] {
        sysctl(&pod, path, "1");
        let expected =
            "replies from 10.8.0.1 to sources outside (192.0.2.1) leave by another interface";
        is_found(
            &pod,
            Kind::RpFilter,
            "net.ipv4.conf.net1.rp_filter",
            expected,
        );
        assert!(dial().is_none());
        sysctl(&pod, path, "0");
    }
    // The greater value counts; 2 is loose mode.
    sysctl(&pod, "ipv4/conf/all/rp_filter", "1");
    sysctl(&pod, "ipv4/conf/net1/rp_filter", "2");
    is_clean(&pod);
    assert!(arrives(&inbound, &dial().unwrap()));
    // A route for replies to that interface.
    sysctl(&pod, "ipv4/conf/net1/rp_filter", "1");
    pod.ip("rule add from 10.8.0.1 lookup 200");
    pod.ip("route add default via 10.8.0.2 dev net1 table 200");
    is_clean(&pod);
    assert!(arrives(&inbound, &dial().unwrap()));
}

#[test]
fn strict_reverse_path_filtering_is_told_where_it_drops_host_probes() {
    let (pod, server) = pod();
    let inbound = listen(&pod, 15006);
    server.ip("addr add 169.254.7.127/32 dev lo");
    let probe = || dial(&server, Some("169.254.7.127"), 0, address(POD, 8080));
    sysctl(&pod, "ipv4/conf/eth0/rp_filter", "1");
    is_clean(&pod);
    assert!(arrives(&inbound, &probe().unwrap()));
    connect(&pod, &server, "net1", ["10.8.0.1", "10.8.0.2"]);
    pod.ip("route add 169.254.0.0/16 dev net1");
    is_found(
        &pod,
        Kind::RpFilter,
        "net.ipv4.conf.eth0.rp_filter",
        "to host probes (169.254.7.127)",
    );
    assert!(probe().is_none());
}

#[test]
fn strict_reverse_path_filtering_does_no_harm_with_one_interface() {
    let (pod, server) = pod();
    let (application, inbound, outbound) =
        (listen(&pod, 8080), listen(&pod, 15006), listen(&pod, 15001));
    server.ip("addr add 203.0.113.5/32 dev lo");
    for interface in ["all", "lo", "eth0"] {
        sysctl(&pod, &format!("ipv4/conf/{interface}/rp_filter"), "1");
    }
    is_clean(&pod);
    for client in [SERVER, "203.0.113.5"] {
        let stream = dial(&server, Some(client), 0, address(POD, 8080)).unwrap();
        assert!(arrives(&inbound, &stream));
        // ztunnel uses the client's source address.
        let stream = dial(&pod, Some(client), FROM_ZTUNNEL, address(POD, 8080)).unwrap();
        assert!(arrives(&application, &stream));
    }
    let stream = dial(&pod, None, 0, address(SERVER, 80)).unwrap();
    assert!(arrives(&outbound, &stream));
}

#[test]
fn ipv6_that_is_switched_off_is_told_where_the_pod_has_it_or_our_rules_are_for_it() {
    let pod = Fresh::new();
    let dual = ["10.9.0.1", "fd09::1"].map(|address| address.parse().unwrap());
    assert_eq!(find_conflicts(&pod.netns, &dual).unwrap(), []);
    sysctl(&pod, "ipv6/conf/all/disable_ipv6", "1");
    is_clean(&pod);
    let found = find_conflicts(&pod.netns, &dual).unwrap();
    let [finding] = found.as_slice() else {
        panic!("{found:#?}");
    };
    let subject = "net.ipv6.conf.lo.disable_ipv6";
    assert_eq!(
        (finding.kind, finding.subject.as_str()),
        (Kind::Ipv6Disabled, subject)
    );
    assert!(
        finding.sentence.contains("the pod has fd09::1"),
        "{finding:?}"
    );
    sysctl(&pod, "ipv6/conf/all/disable_ipv6", "0");
    capture(&pod);
    is_clean(&pod);
    sysctl(&pod, "ipv6/conf/lo/disable_ipv6", "1");
    is_found(
        &pod,
        Kind::Ipv6Disabled,
        subject,
        "inpod's ip rule for IPv6 exists",
    );
}
