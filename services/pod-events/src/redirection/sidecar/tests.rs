use super::*;
use crate::{redirection::Ipv6, testing::capture};

const PROXY: Proxy = Proxy {
    uid: 1337,
    gid: 1337,
    dns: false,
    drop_invalid: false,
};

fn read(annotations: &[(&'static str, &str)]) -> Result<Sidecar, Malformed> {
    let value = |name: &str| annotations.iter().find(|(known, _)| *known == name);
    Sidecar::from_annotations(PROXY, |name| value(name).map(|(_, text)| *text))
}

fn on_the_wire(annotations: &[(&'static str, &str)]) -> wire::SidecarRedirection {
    read(annotations).unwrap().to_wire(&capture())
}

fn some_ports(ports: &[u32]) -> Option<wire::PortSelection> {
    Some(wire::PortSelection {
        all: false,
        ports: ports.to_vec(),
    })
}

fn all_ports() -> Option<wire::PortSelection> {
    Some(wire::PortSelection {
        all: true,
        ports: Vec::new(),
    })
}

fn some_networks(networks: &[&str]) -> Option<wire::NetworkSelection> {
    Some(wire::NetworkSelection {
        all: false,
        networks: networks.iter().map(|&it| it.to_owned()).collect(),
    })
}

#[test]
fn a_pod_that_says_nothing_is_captured_as_istios_plugin_does_it() {
    let expected = wire::SidecarRedirection {
        inbound_capture: wire::InboundCapture::Redirect.into(),
        proxy_uids: vec![1337],
        proxy_gids: vec![1337],
        inbound_ports: all_ports(),
        excluded_inbound_ports: vec![15020, 15021, 15090],
        outbound_networks: Some(wire::NetworkSelection {
            all: true,
            networks: Vec::new(),
        }),
        excluded_outbound_ports: vec![15020],
        loopback_network: "127.0.0.1/32".to_owned(),
        ..wire::SidecarRedirection::default()
    };
    assert_eq!(on_the_wire(&[]), expected);
}

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
        excluded_owner_groups: vec![Group(7)],
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
fn inbound_tcp_is_led_as_the_annotation_says() {
    for (mode, capture) in [
        ("REDIRECT", wire::InboundCapture::Redirect),
        ("TPROXY", wire::InboundCapture::Tproxy),
    ] {
        let redirection = on_the_wire(&[(keys::INTERCEPTION_MODE, mode)]);
        assert_eq!(redirection.inbound_capture(), capture, "{mode}");
    }
}

#[test]
fn inbound_ports_are_all_or_none_or_some() {
    let of = |text| on_the_wire(&[(keys::SIDECAR_INCLUDE_INBOUND_PORTS, text)]).inbound_ports;
    assert_eq!(of("*"), all_ports());
    assert_eq!(of(""), None);
    assert_eq!(of("  "), None);
    assert_eq!(of("8080"), some_ports(&[8080]));
    assert_eq!(
        of(" 2222 , 1111, 01111,65535,1"),
        some_ports(&[1, 1111, 2222, 65535])
    );
    // Istio accepts port 0, to which nothing can connect.
    assert_eq!(of("0"), None);
    assert_eq!(of("0,80"), some_ports(&[80]));
}

#[test]
fn what_is_excluded_inbound_comes_on_top_of_the_proxys_own_ports() {
    let name = keys::SIDECAR_EXCLUDE_INBOUND_PORTS;
    let of = |text| on_the_wire(&[(name, text)]).excluded_inbound_ports;
    assert_eq!(of(""), [15020, 15021, 15090]);
    assert_eq!(of("3306"), [3306, 15020, 15021, 15090]);
    assert_eq!(of("15021,3333,15090"), [3333, 15020, 15021, 15090]);
}

#[test]
fn what_is_excluded_outbound_takes_the_place_of_the_default() {
    let name = keys::SIDECAR_EXCLUDE_OUTBOUND_PORTS;
    let of = |text| on_the_wire(&[(name, text)]).excluded_outbound_ports;
    assert_eq!(of(""), [0; 0]);
    assert_eq!(of("5555"), [5555]);
    assert_eq!(of("5555, 53"), [53, 5555]);
    let forced = on_the_wire(&[(keys::SIDECAR_INCLUDE_OUTBOUND_PORTS, "32000,31000")]);
    assert_eq!(forced.outbound_ports, [31000, 32000]);
}

#[test]
fn networks_are_all_or_none_or_some_without_what_is_beyond_their_prefix() {
    let of = |text| on_the_wire(&[(keys::SIDECAR_INCLUDE_NETWORKS, text)]).outbound_networks;
    assert!(of("*").unwrap().all);
    assert_eq!(of(""), None);
    let mixed = "10.1.2.3/8,fd00::1/8,127.1.2.3/32,0.0.0.0/0,::/0";
    let expected = [
        "0.0.0.0/0",
        "10.0.0.0/8",
        "127.1.2.3/32",
        "::/0",
        "fd00::/8",
    ];
    assert_eq!(of(mixed), some_networks(&expected));
    let excluded = [(keys::SIDECAR_EXCLUDE_NETWORKS, "1.1.0.0/16")];
    let excluded = on_the_wire(&excluded).excluded_outbound_networks;
    assert_eq!(excluded, ["1.1.0.0/16"]);
}

#[test]
fn interfaces_are_named_and_the_older_name_of_an_annotation_counts_where_the_newer_is_missing() {
    let names = "not-istio-nic, eth1.2 ,a_b";
    let redirection = on_the_wire(&[(keys::SIDECAR_EXCLUDE_INTERFACES, names)]);
    assert_eq!(
        redirection.excluded_interfaces,
        ["a_b", "eth1.2", "not-istio-nic"]
    );
    let (newer, older) = (
        keys::REROUTE_VIRTUAL_INTERFACES,
        keys::SIDECAR_KUBEVIRT_INTERFACES,
    );
    let of = |value: &[_]| on_the_wire(value).reroute_virtual_interfaces;
    assert_eq!(of(&[(older, "vm0")]), ["vm0"]);
    assert_eq!(of(&[(older, "vm0"), (newer, "vm1")]), ["vm1"]);
    assert_eq!(of(&[(older, "vm0"), (newer, "")]), [""; 0]);
    // An overridden annotation need not be valid.
    assert_eq!(of(&[(older, "no name"), (newer, "vm1")]), ["vm1"]);
}

const PORTS: &[&str] = &[
    "-1",
    "+80",
    "65536",
    "99999999999999999999",
    "http",
    "80;81",
    "80 81",
    "80,",
    ",80",
    "80,,81",
    ",",
    "0x50",
    "8080-8090",
    "80,*",
    "٨٠",
    "80.0",
    "1e3",
    "80\n81",
    "\u{0}",
    "80/tcp",
];
const NETWORKS: &[&str] = &[
    "10.0.0.0",
    "10.0.0.0/33",
    "10.0.0.0/-1",
    "10.0.0.0/+8",
    "10.0.0.0/08",
    "10.0.0.0/",
    "/8",
    "10.0.0/8",
    "010.0.0.0/8",
    "10.0.0.0/8,",
    "10.0.0.0/8, 11.0.0.0/8",
    " 10.0.0.0/8",
    " ",
    ",",
    "fd00::/129",
    "fd00::%eth0/64",
    "::ffff:10.0.0.0/104",
    "fd00:/8",
    "shop/8",
    "10.0.0.0/8,*",
    "10.0.0.0/8/8",
    "10.0.0.0/8;11.0.0.0/8",
];
const INTERFACES: &[&str] = &[
    "eth0,",
    ",eth0",
    "eth0,,eth1",
    ",",
    "0eth",
    "-i",
    "_x",
    "eth 0",
    "eth0;reboot",
    "eth0\nRETURN",
    "eth*",
    "eth/0",
    "sixteen-bytes-ab",
    "éth0",
    "eth0 -j ACCEPT",
];
const MODES: &[&str] = &[
    "",
    "redirect",
    "Tproxy",
    "TPROXY ",
    "REDIRECT,TPROXY",
    "BOTH",
    "NFT",
];

#[test]
fn what_is_malformed_is_refused_by_the_annotations_name_and_with_what_to_do() {
    let wildcard: &[&str] = &["*", " *"];
    let (include_inbound, include_outbound) = (
        keys::SIDECAR_INCLUDE_INBOUND_PORTS,
        keys::SIDECAR_INCLUDE_OUTBOUND_PORTS,
    );
    let cases: &[(&'static str, &[&[&str]])] = &[
        (keys::INTERCEPTION_MODE, &[MODES]),
        (include_inbound, &[PORTS]),
        (keys::SIDECAR_EXCLUDE_INBOUND_PORTS, &[PORTS, wildcard]),
        (include_outbound, &[PORTS, wildcard]),
        (keys::SIDECAR_EXCLUDE_OUTBOUND_PORTS, &[PORTS, wildcard]),
        (keys::SIDECAR_INCLUDE_NETWORKS, &[NETWORKS]),
        (keys::SIDECAR_EXCLUDE_NETWORKS, &[NETWORKS, wildcard]),
        (keys::SIDECAR_EXCLUDE_INTERFACES, &[INTERFACES]),
        (keys::REROUTE_VIRTUAL_INTERFACES, &[INTERFACES]),
        (keys::SIDECAR_KUBEVIRT_INTERFACES, &[INTERFACES]),
    ];
    let mut refused = 0;
    for (annotation, lists) in cases {
        for bad in lists.iter().copied().flatten() {
            let error = read(&[(annotation, bad)]).expect_err(&format!("{annotation}: {bad:?}"));
            assert_eq!(error.annotation, *annotation, "{bad:?}");
            assert!(error.why.contains("; give "), "{error}");
            refused += 1;
        }
    }
    let kinds = PORTS.len() + NETWORKS.len() + INTERFACES.len() + MODES.len();
    assert!(kinds >= 50 && refused >= kinds, "{kinds} {refused}");
}

#[test]
fn the_first_annotation_that_is_malformed_is_named_in_istios_order() {
    let all = [
        (keys::SIDECAR_EXCLUDE_INTERFACES, "0"),
        (keys::SIDECAR_EXCLUDE_OUTBOUND_PORTS, "x"),
        (keys::SIDECAR_INCLUDE_NETWORKS, "x"),
        (keys::INTERCEPTION_MODE, "x"),
    ];
    for last in (0..all.len()).rev() {
        let error = read(&all[..=last]).unwrap_err();
        assert_eq!(error.annotation, all[last].0);
    }
}

#[test]
fn lists_are_as_long_as_netconfig_takes_them_and_no_error_repeats_one_whole() {
    let list = |count: u32| {
        let entries: Vec<_> = (1..=count).map(|n| n.to_string()).collect();
        entries.join(",")
    };
    let (inbound, outbound) = (
        keys::SIDECAR_EXCLUDE_INBOUND_PORTS,
        keys::SIDECAR_EXCLUDE_OUTBOUND_PORTS,
    );
    read(&[(outbound, &list(64))]).unwrap();
    read(&[(outbound, &list(65))]).unwrap_err();
    // The proxy's own ports count.
    read(&[(inbound, &list(61))]).unwrap();
    let error = read(&[(inbound, &list(62))]).unwrap_err();
    assert!(error.to_string().contains("more than 64"), "{error}");
    let names = |count: u32| list(count).replace(',', ",if").replacen('1', "if1", 1);
    read(&[(keys::SIDECAR_EXCLUDE_INTERFACES, &names(16))]).unwrap();
    read(&[(keys::SIDECAR_EXCLUDE_INTERFACES, &names(17))]).unwrap_err();
    let error = read(&[(outbound, &"x".repeat(100_000))]).unwrap_err();
    assert!(error.why.len() < 200, "{error}");
}
