use super::*;
use crate::{
    nftables::MAX_RULES,
    rules::{InboundCapture, Ipv6, Redirection},
};

fn wanted() -> v1::SidecarRedirection {
    v1::SidecarRedirection {
        proxy_uids: vec![1337],
        ..v1::SidecarRedirection::default()
    }
}

fn refused(change: impl FnOnce(&mut v1::SidecarRedirection)) -> Invalid {
    let mut wanted = wanted();
    change(&mut wanted);
    sidecar(wanted).unwrap_err()
}

fn some_ports(ports: Vec<u32>) -> v1::PortSelection {
    v1::PortSelection { all: false, ports }
}

fn some_networks(networks: Vec<String>) -> v1::NetworkSelection {
    v1::NetworkSelection {
        all: false,
        networks,
    }
}

fn some_servers(servers: Vec<String>) -> v1::DnsSelection {
    v1::DnsSelection {
        all: false,
        servers,
    }
}

#[test]
fn what_is_not_said_is_off() {
    let parsed = sidecar(wanted()).unwrap();
    let nothing = Sidecar {
        proxy_users: vec![Owner::new(1337).unwrap()],
        ..Sidecar::default()
    };
    assert_eq!(parsed, nothing);
}

#[test]
fn everything_that_is_said_is_programmed() {
    let parsed = sidecar(v1::SidecarRedirection {
        inbound_capture: v1::InboundCapture::Tproxy.into(),
        ipv6: v1::Ipv6Capture::Off.into(),
        proxy_uids: vec![0, 1337],
        proxy_gids: vec![1337],
        inbound_ports: Some(v1::PortSelection {
            all: true,
            ports: Vec::new(),
        }),
        excluded_inbound_ports: vec![15020],
        outbound_networks: Some(some_networks(vec!["10.0.0.0/8".into()])),
        excluded_outbound_networks: vec!["10.1.0.0/16".into()],
        outbound_ports: vec![443],
        excluded_outbound_ports: vec![54],
        excluded_interfaces: vec!["eth1".into()],
        reroute_virtual_interfaces: vec!["vm0".into()],
        owner_groups: Some(v1::GroupSelection { groups: vec![2] }),
        excluded_owner_groups: vec![3],
        dns: Some(some_servers(vec!["10.96.0.10".into(), "fd00::a".into()])),
        drop_invalid: true,
        loopback_network: "127.0.0.0/8".into(),
    })
    .unwrap();
    assert_eq!(parsed.inbound_capture, InboundCapture::Tproxy);
    assert_eq!(parsed.ipv6, Ipv6::Off);
    assert_eq!(parsed.inbound_ports, Selection::All);
    assert!(parsed.drop_invalid && parsed.owner_groups.is_some());
    let ruleset = Redirection::Sidecar(parsed).ruleset().to_string();
    for said in [
        "10.0.0.0/8",
        "10.1.0.0/16",
        "15020",
        "dport 443",
        "dport 54 ",
        "iifname \"eth1\"",
        "iifname \"vm0\"",
        "skgid != 2",
        "skgid 3 ",
        "skgid 1337 ",
        "daddr 10.96.0.10 ",
        "ct state invalid",
        "!= 127.0.0.0/8",
        "skuid 0 ",
        "skuid 1337 ",
    ] {
        assert!(ruleset.contains(said), "{said}: {ruleset}");
    }
    assert!(!ruleset.contains("ip6"), "{ruleset}");
}

type Change<T> = fn(&mut v1::SidecarRedirection, Vec<T>);

#[test]
fn a_proxy_without_a_user_and_owners_that_are_nobody_are_refused_by_name() {
    let error = refused(|wanted| wanted.proxy_uids.clear());
    assert_eq!(error.field(), PROXY_UIDS);
    let cases: [(&str, Change<u32>); 4] = [
        (PROXY_UIDS, |wanted, some| wanted.proxy_uids = some),
        (PROXY_GIDS, |wanted, some| wanted.proxy_gids = some),
        (EXCLUDED_OWNER_GROUPS, |wanted, some| {
            wanted.excluded_owner_groups = some;
        }),
        (OWNER_GROUPS, |wanted, groups| {
            wanted.owner_groups = Some(v1::GroupSelection { groups });
        }),
    ];
    for (field, change) in cases {
        for bad in [vec![u32::MAX], vec![7, 7], (1..=65).collect()] {
            let error = refused(|wanted| change(wanted, bad));
            assert_eq!(error.field(), field);
        }
    }
}

#[test]
fn ports_that_are_none_too_many_or_there_twice_are_refused_by_name() {
    let cases: [(&str, Change<u32>); 4] = [
        (INBOUND_PORTS, |wanted, some| {
            wanted.inbound_ports = Some(some_ports(some));
        }),
        (EXCLUDED_INBOUND_PORTS, |wanted, some| {
            wanted.excluded_inbound_ports = some;
        }),
        (OUTBOUND_PORTS, |wanted, some| wanted.outbound_ports = some),
        (EXCLUDED_OUTBOUND_PORTS, |wanted, some| {
            wanted.excluded_outbound_ports = some;
        }),
    ];
    for (field, change) in cases {
        for bad in [vec![0], vec![65536], vec![80, 80], (1..=65).collect()] {
            let error = refused(|wanted| change(wanted, bad));
            assert_eq!(error.field(), field);
        }
    }
}

#[test]
fn texts_that_are_not_what_they_should_be_are_refused_by_name() {
    let cases: [(&str, Change<String>, &[&str]); 5] = [
        (
            OUTBOUND_NETWORKS,
            |wanted, some| wanted.outbound_networks = Some(some_networks(some)),
            &["10.0.0.1/8", "10.0.0.0", "", "*", "10.0.0.0/8\nx"],
        ),
        (
            EXCLUDED_OUTBOUND_NETWORKS,
            |wanted, some| wanted.excluded_outbound_networks = some,
            &["10.0.0.1/8", "*"],
        ),
        (
            EXCLUDED_INTERFACES,
            |wanted, some| wanted.excluded_interfaces = some,
            &["a b", "", "sixteen-bytes-ab", "-j", "eth+"],
        ),
        (
            VIRTUAL_INTERFACES,
            |wanted, some| wanted.reroute_virtual_interfaces = some,
            &["a b", ""],
        ),
        (
            DNS_SERVERS,
            |wanted, some| wanted.dns = Some(some_servers(some)),
            &["10.0.0.0/8", "", "localhost", "10.0.0.1:53"],
        ),
    ];
    for (field, change, texts) in cases {
        for bad in texts {
            let error = refused(|wanted| change(wanted, vec![(*bad).to_owned()]));
            assert_eq!(error.field(), field, "{bad:?}");
        }
        let many = (0..65).map(|number| format!("10.{number}.0.0/16"));
        let error = refused(|wanted| change(wanted, many.collect()));
        assert!(error.to_string().contains("65 entries"), "{error}");
    }
}

#[test]
fn all_and_some_of_them_is_no_choice() {
    let error = refused(|wanted| {
        wanted.inbound_ports = Some(v1::PortSelection {
            all: true,
            ports: vec![80],
        });
    });
    assert_eq!(error.field(), INBOUND_PORTS);
    let error = refused(|wanted| {
        wanted.outbound_networks = Some(v1::NetworkSelection {
            all: true,
            networks: vec!["10.0.0.0/8".into()],
        });
    });
    assert_eq!(error.field(), OUTBOUND_NETWORKS);
    let error = refused(|wanted| {
        wanted.dns = Some(v1::DnsSelection {
            all: true,
            servers: vec!["10.0.0.1".into()],
        });
    });
    assert_eq!(error.field(), DNS_SERVERS);
}

#[test]
fn a_loopback_network_elsewhere_and_a_value_of_a_later_release_are_refused_by_name() {
    for bad in ["10.0.0.0/8", "127.0.0.1/8", "::1/128", "127.0.0.1"] {
        let error = refused(|wanted| wanted.loopback_network = bad.to_owned());
        assert_eq!(error.field(), LOOPBACK, "{bad}");
    }
    let error = refused(|wanted| wanted.inbound_capture = 7);
    assert_eq!(error.field(), INBOUND_CAPTURE);
    let error = refused(|wanted| wanted.ipv6 = 7);
    assert_eq!(error.field(), IPV6);
}

/// netconfig does not read tables of more rules, and would replace such a table of its own again and again.
#[test]
fn the_largest_redirection_has_fewer_rules_than_are_read() {
    let ports = || (1..=64).collect::<Vec<u32>>();
    let networks = || (0..64).map(|it| format!("10.{it}.0.0/16"));
    let networks = || networks().collect::<Vec<_>>();
    let interfaces = || (0..16).map(|it| format!("vm{it}")).collect::<Vec<_>>();
    let largest = sidecar(v1::SidecarRedirection {
        inbound_capture: v1::InboundCapture::Tproxy.into(),
        proxy_uids: ports(),
        proxy_gids: ports(),
        inbound_ports: Some(some_ports(ports())),
        outbound_networks: Some(some_networks(networks())),
        excluded_outbound_networks: networks(),
        outbound_ports: ports(),
        excluded_outbound_ports: (64..128).collect(),
        excluded_interfaces: interfaces(),
        reroute_virtual_interfaces: interfaces(),
        owner_groups: Some(v1::GroupSelection { groups: ports() }),
        excluded_owner_groups: ports(),
        dns: Some(some_servers(
            (0..64).map(|it| format!("10.0.0.{it}")).collect(),
        )),
        drop_invalid: true,
        ..wanted()
    });
    let largest = Redirection::Sidecar(largest.unwrap());
    for table in largest.ruleset().tables {
        let rules = table.chains.iter().map(|chain| chain.rules.len());
        let rules: usize = rules.sum();
        assert!(rules > 0, "{}", table.name);
        assert!(u32::try_from(rules).unwrap() < MAX_RULES / 2, "{rules}");
    }
}
