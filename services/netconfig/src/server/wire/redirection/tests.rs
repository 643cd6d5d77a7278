use super::*;
use crate::nftables::MAX_RULES;

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
fn every_sidecar_field_changes_the_rules() {
    let parsed = Sidecar::try_from(v1::SidecarRedirection {
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
    let ruleset = Redirection::Sidecar(parsed).ruleset().to_string();
    for setting in [
        "tproxy",
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
        assert!(ruleset.contains(setting), "{setting}: {ruleset}");
    }
    assert!(!ruleset.contains("ip6"), "{ruleset}");
}

/// netconfig does not read tables of more rules, and would replace such a table of its own again and again.
#[test]
fn the_largest_redirection_has_fewer_rules_than_are_read() {
    let ports = || (1..=64).collect::<Vec<u32>>();
    let networks = || (0..64).map(|it| format!("10.{it}.0.0/16"));
    let networks = || networks().collect::<Vec<_>>();
    let interfaces = || (0..16).map(|it| format!("vm{it}")).collect::<Vec<_>>();
    let largest = Sidecar::try_from(v1::SidecarRedirection {
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
        ..v1::SidecarRedirection::default()
    });
    let largest = Redirection::Sidecar(largest.unwrap());
    for table in largest.ruleset().tables {
        let rules = table.chains.iter().map(|chain| chain.rules.len());
        let rules: usize = rules.sum();
        assert!(rules > 0, "{}", table.name);
        assert!(u32::try_from(rules).unwrap() < MAX_RULES / 2, "{rules}");
    }
}
