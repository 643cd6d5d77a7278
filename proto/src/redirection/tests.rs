use super::*;

/// The kernel test `service::refusals` holds the other fields of ambient mode and the paths of the fields.
#[test]
fn ambient_fields_are_refused_by_name() {
    type Change = fn(&mut v1::AmbientRedirection, &mut v1::Exclusions);
    let cases: [(&str, &str, Change); 8] = [
        ("inbound_capture", "TPROXY", |it, _| it.inbound_capture = 2),
        ("inbound_capture", "value 7", |it, _| it.inbound_capture = 7),
        ("ipv6", "value 7", |it, _| it.ipv6 = 7),
        ("probe_ports", "all are", |it, _| {
            it.probe_ports = Some(some_ports(true, &[8080]));
        }),
        ("probe_ports", "80 is listed twice", |it, _| {
            it.probe_ports = Some(some_ports(false, &[80, 80]));
        }),
        ("reroute_virtual_interfaces", "17 entries", |it, _| {
            it.reroute_virtual_interfaces = vec!["x".into(); 17];
        }),
        ("exclusions.inbound_ports", "15008", |_, exclusions| {
            exclusions.inbound_ports = vec![15008];
        }),
        (
            "exclusions.outbound_cidrs",
            "10000 entries",
            |_, exclusions| exclusions.outbound_cidrs = vec!["x".into(); 10_000],
        ),
    ];
    for (field, text, change) in cases {
        let (mut wanted, mut exclusions) = Default::default();
        change(&mut wanted, &mut exclusions);
        wanted.exclusions = Some(exclusions);
        let error = Ambient::try_from(wanted).unwrap_err();
        assert_eq!(error.field(), field);
        assert!(error.to_string().contains(text), "{error}");
    }
    let nothing = Ambient::try_from(v1::AmbientRedirection::default());
    assert_eq!(nothing.unwrap(), Ambient::default());
}

#[test]
fn probes_may_reach_every_port_unless_ports_are_listed() {
    for (all, ports, expected) in [
        (true, &[][..], None),
        (false, &[], Some(Vec::new())),
        (false, &[8080], Some(vec![8080.try_into().unwrap()])),
    ] {
        let wanted = v1::AmbientRedirection {
            probe_ports: Some(some_ports(all, ports)),
            ..v1::AmbientRedirection::default()
        };
        assert_eq!(Ambient::try_from(wanted).unwrap().probe_ports, expected);
    }
}

#[test]
fn exclusions_survive_the_round_trip() {
    let message = v1::Exclusions {
        outbound_ports: vec![443, 80],
        outbound_cidrs: vec!["192.0.2.1/32".into(), "10.0.0.0/8".into()],
        inbound_ports: vec![9090],
        inbound_cidrs: vec!["fd00::/64".into()],
    };
    let checked = Exclusions::try_from(message.clone()).unwrap();
    assert_eq!(v1::Exclusions::from(&checked), message);
}

fn some_ports(all: bool, ports: &[u32]) -> v1::PortSelection {
    let ports = ports.into();
    v1::PortSelection { all, ports }
}

fn some_networks(all: bool, networks: Vec<String>) -> Option<v1::NetworkSelection> {
    Some(v1::NetworkSelection { all, networks })
}

fn some_servers(all: bool, servers: Vec<String>) -> Option<v1::DnsSelection> {
    Some(v1::DnsSelection { all, servers })
}

fn sidecar() -> v1::SidecarRedirection {
    v1::SidecarRedirection {
        proxy_uids: vec![1337],
        ..v1::SidecarRedirection::default()
    }
}

fn refused(change: impl FnOnce(&mut v1::SidecarRedirection)) -> Invalid {
    let mut wanted = sidecar();
    change(&mut wanted);
    Sidecar::try_from(wanted).unwrap_err()
}

#[test]
fn sidecar_fields_are_off_unless_set() {
    let nothing = Sidecar {
        proxy_users: vec![Owner::new(1337).unwrap()],
        ..Sidecar::default()
    };
    assert_eq!(Sidecar::try_from(sidecar()), Ok(nothing));
}

type Change<T> = fn(&mut v1::SidecarRedirection, Vec<T>);

#[test]
fn sidecar_numbers_are_refused_by_field() {
    let owners: [(&str, Change<u32>); 4] = [
        ("proxy_uids", |it, some| it.proxy_uids = some),
        ("proxy_gids", |it, some| it.proxy_gids = some),
        ("excluded_owner_groups", |it, some| {
            it.excluded_owner_groups = some;
        }),
        ("owner_groups.groups", |it, groups| {
            it.owner_groups = Some(v1::GroupSelection { groups });
        }),
    ];
    let ports: [(&str, Change<u32>); 4] = [
        ("inbound_ports.ports", |it, some| {
            it.inbound_ports = Some(some_ports(false, &some));
        }),
        ("excluded_inbound_ports", |it, some| {
            it.excluded_inbound_ports = some;
        }),
        ("outbound_ports", |it, some| it.outbound_ports = some),
        ("excluded_outbound_ports", |it, some| {
            it.excluded_outbound_ports = some;
        }),
    ];
    for (cases, wrong) in [(owners, u32::MAX), (ports, 65536)] {
        for (field, change) in cases {
            for bad in [vec![wrong], vec![7, 7], (1..=65).collect()] {
                let error = refused(|it| change(it, bad));
                assert_eq!(error.field(), field);
            }
        }
    }
    assert_eq!(refused(|it| it.proxy_uids.clear()).field(), "proxy_uids");
}

#[test]
fn sidecar_texts_are_refused_by_field() {
    let cases: [(&str, Change<String>, &str); 5] = [
        (
            "outbound_networks.networks",
            |it, some| it.outbound_networks = some_networks(false, some),
            "10.0.0.1/8",
        ),
        (
            "excluded_outbound_networks",
            |it, some| it.excluded_outbound_networks = some,
            "*",
        ),
        (
            "excluded_interfaces",
            |it, some| it.excluded_interfaces = some,
            "eth+",
        ),
        (
            "reroute_virtual_interfaces",
            |it, some| it.reroute_virtual_interfaces = some,
            "a b",
        ),
        (
            "dns.servers",
            |it, some| it.dns = some_servers(false, some),
            "10.0.0.1:53",
        ),
    ];
    for (field, change, bad) in cases {
        let error = refused(|it| change(it, vec![bad.to_owned()]));
        assert_eq!(error.field(), field);
        let error = refused(|it| change(it, vec!["x".to_owned(); 65]));
        assert!(error.to_string().contains("65 entries"), "{error}");
    }
    let error = refused(|it| it.loopback_network = "10.0.0.0/8".to_owned());
    assert_eq!(error.field(), "loopback_network");
}

#[test]
fn a_selection_of_all_has_no_entries() {
    for (field, error) in [
        (
            "inbound_ports.ports",
            refused(|it| it.inbound_ports = Some(some_ports(true, &[80]))),
        ),
        (
            "outbound_networks.networks",
            refused(|it| it.outbound_networks = some_networks(true, vec!["10.0.0.0/8".into()])),
        ),
        (
            "dns.servers",
            refused(|it| it.dns = some_servers(true, vec!["10.0.0.1".into()])),
        ),
    ] {
        assert_eq!(error.field(), field);
    }
}
