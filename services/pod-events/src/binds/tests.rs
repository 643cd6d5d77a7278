use BindChange::{Lost, PortTaken};
use BindWarning::{FamilyMissing, LocalhostForwardingExposes, LocalhostForwardingMisses};
use wire::{BindChange, BindKind, BindWarning, PortBinds};

use super::*;

const HTTP: Port = (Protocol::Tcp, 8080);

fn network(ztunnel: Ztunnel) -> PodNetwork {
    let addresses = ["10.0.0.2", "fd00::2"].map(|it| it.parse().unwrap());
    PodNetwork {
        addresses: addresses.into(),
        ztunnel,
    }
}

fn socket(port: Port, address: &str) -> Socket {
    Socket {
        port,
        address: address.parse().unwrap(),
        dual_stack: address == "::",
        uid: 0,
        interface: None,
    }
}

fn at(address: &str) -> Socket {
    socket(HTTP, address)
}

fn only_v6() -> Socket {
    Socket {
        dual_stack: false,
        ..at("::")
    }
}

fn on_interface(address: &str, interface: u32) -> Socket {
    Socket {
        interface: Some(interface),
        ..at(address)
    }
}

fn classified(sockets: Vec<Socket>) -> PortBinds {
    let mut ports = PortIndex::default();
    ports.add_container_port(&DeclaredPort {
        protocol: HTTP.0,
        port: HTTP.1,
        name: Some("http".to_owned()),
    });
    let mut ports = ports.with_sockets(sockets, &network(Ztunnel::Needs));
    assert_eq!(ports.len(), 1, "{ports:?}");
    ports.remove(0)
}

#[test]
fn each_bind_is_of_its_kind_and_warned_of_where_forwarding_to_localhost_differs() {
    for (sockets, kind, warnings) in [
        (vec![at("::")], BindKind::Wildcard, &[][..]),
        (vec![at("0.0.0.0"), only_v6()], BindKind::Wildcard, &[]),
        (vec![at("0.0.0.0")], BindKind::Wildcard, &[FamilyMissing]),
        (vec![only_v6()], BindKind::Wildcard, &[FamilyMissing]),
        (
            vec![at("10.0.0.2"), at("fd00::2")],
            BindKind::PodIp,
            &[LocalhostForwardingMisses],
        ),
        (
            vec![at("10.0.0.2")],
            BindKind::PodIp,
            &[LocalhostForwardingMisses, FamilyMissing],
        ),
        (
            vec![at("127.0.0.1"), at("10.0.0.2"), at("fd00::2")],
            BindKind::PodIp,
            &[],
        ),
        (
            vec![at("127.0.0.1")],
            BindKind::Localhost,
            &[LocalhostForwardingExposes],
        ),
        (
            vec![at("::1")],
            BindKind::Localhost,
            &[LocalhostForwardingExposes],
        ),
        (
            vec![at("10.9.9.9")],
            BindKind::Other,
            &[LocalhostForwardingMisses],
        ),
        (vec![], BindKind::NotFound, &[]),
    ] {
        let port = classified(sockets.clone());
        assert_eq!(port.kind(), kind, "{sockets:?}");
        assert_eq!(port.warnings().collect::<Vec<_>>(), warnings, "{sockets:?}");
        assert_eq!(port.changes().count(), 0, "{sockets:?}");
        assert_eq!(port.binds.len(), sockets.len());
    }
}

#[test]
fn only_a_socket_that_accepts_both_families_has_both() {
    let families = |sockets| {
        let binds = classified(sockets).binds;
        binds
            .iter()
            .map(|it| (it.ipv4, it.ipv6))
            .collect::<Vec<_>>()
    };
    assert_eq!(families(vec![at("::")]), [(true, true)]);
    assert_eq!(families(vec![only_v6()]), [(false, true)]);
    assert_eq!(families(vec![at("0.0.0.0")]), [(true, false)]);
    assert_eq!(families(vec![at("fd00::2")]), [(false, true)]);
}

#[test]
fn what_is_bound_to_an_interface_is_reached_differently_in_the_mesh() {
    let changes = |sockets| classified(sockets).changes().collect::<Vec<_>>();
    assert_eq!(changes(vec![on_interface("0.0.0.0", 2)]), [Lost]);
    assert_eq!(changes(vec![on_interface("10.0.0.2", 2)]), [Lost]);
    // Another socket of the same family accepts the connection.
    let both = vec![on_interface("0.0.0.0", 2), at("0.0.0.0")];
    assert_eq!(changes(both), []);
    let no_help = vec![on_interface("0.0.0.0", 2), on_interface("0.0.0.0", 1)];
    assert_eq!(changes(no_help), [Lost]);
    let other_family = vec![on_interface("0.0.0.0", 2), only_v6()];
    assert_eq!(changes(other_family), [Lost]);
    // In either case, only the pod itself can reach the socket.
    for address in ["127.0.0.1", "0.0.0.0", "10.0.0.2"] {
        let port = classified(vec![on_interface(address, 1)]);
        assert_eq!(port.kind(), BindKind::Localhost);
        assert_eq!(port.changes().count(), 0);
    }
}

#[test]
fn ports_that_ztunnel_needs_conflict_and_its_own_are_not_listed() {
    let sockets = || {
        let taken = [15001, 15006, 15008, 15053].map(|port| (Protocol::Tcp, port));
        let taken = taken
            .into_iter()
            .chain([(Protocol::Udp, 15053), (Protocol::Udp, 15008)]);
        taken.map(|port| socket(port, "::")).collect::<Vec<_>>()
    };
    let classify = |ztunnel| {
        let ports = PortIndex::default()
            .with_sockets(sockets(), &network(ztunnel))
            .into_iter();
        ports
            .map(|port| (port.port, port.changes().collect::<Vec<_>>()))
            .collect::<Vec<_>>()
    };
    let needed = [15001, 15006, 15008].map(|port| (port, vec![PortTaken]));
    let others = [15053, 15008, 15053].map(|port| (port, vec![]));
    assert_eq!(classify(Ztunnel::Needs), [needed, others].concat());
    assert_eq!(classify(Ztunnel::Has), [(15008, vec![])]);
    let all = [15001, 15006, 15008, 15053, 15008, 15053].map(|port| (port, vec![]));
    assert_eq!(classify(Ztunnel::Never), all);
}

#[test]
fn references_to_a_port_are_listed_and_a_port_without_any_has_no_warnings() {
    let mut index = PortIndex::default();
    for (port, name) in [(80, "http"), (80, "web")] {
        index.add_container_port(&DeclaredPort {
            protocol: Protocol::Tcp,
            port,
            name: Some(name.to_owned()),
        });
    }
    // A Service with endpoints of both families is listed once.
    index.add_service((Protocol::Tcp, 81), "shop");
    index.add_service((Protocol::Tcp, 81), "shop");
    index.add_service((Protocol::Udp, 53), "names");
    let sockets = vec![
        socket((Protocol::Tcp, 9), "127.0.0.1"),
        socket((Protocol::Tcp, 81), "127.0.0.1"),
        socket((Protocol::Udp, 53), "127.0.0.1"),
    ];
    let ports = index
        .clone()
        .with_sockets(sockets, &network(Ztunnel::Needs));
    let binds: Vec<_> = ports
        .iter()
        .map(|it| (it.port, it.declared, it.warnings.len()))
        .collect();
    assert_eq!(
        binds,
        [(9, false, 0), (80, true, 0), (81, false, 1), (53, false, 0)]
    );
    let named = |port: &PortBinds| [port.names.clone(), port.services.clone()].concat();
    let named: Vec<_> = ports.iter().map(named).collect();
    assert_eq!(named, [&[][..], &["http", "web"], &["shop"], &["names"]]);
    // Ports without seen sockets have no classification.
    let without_sockets = index.without_sockets();
    assert_eq!(without_sockets.len(), 3);
    assert!(
        without_sockets
            .iter()
            .all(|port| port.kind() == BindKind::Unspecified)
    );
}

#[test]
fn listeners_from_netconfig_are_validated() {
    let listener = netconfig::Listener {
        protocol: netconfig::Protocol::Tcp.into(),
        address: "::".to_owned(),
        port: 8080,
        dual_stack: true,
        uid: 0,
        interface_index: 0,
    };
    assert_eq!(Socket::try_from(listener.clone()), Ok(at("::")));
    let invalid = [
        netconfig::Listener {
            protocol: 0,
            ..listener.clone()
        },
        netconfig::Listener {
            address: "x".to_owned(),
            ..listener.clone()
        },
        netconfig::Listener {
            port: 70_000,
            ..listener
        },
    ];
    assert!(invalid.into_iter().all(|it| Socket::try_from(it).is_err()));
}
