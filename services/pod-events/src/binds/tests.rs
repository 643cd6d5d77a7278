use BindChange::{Lost, PortTaken};
use BindWarning::{FamilyMissing, LocalhostForwardingExposes, LocalhostForwardingMisses};
use wire::{BindChange, BindKind, BindWarning, PortBinds};

use super::*;

const HTTP: Port = (Protocol::Tcp, 8080);

fn place(ztunnel: Ztunnel) -> Place {
    let addresses = ["10.0.0.2", "fd00::2"].map(|it| it.parse().unwrap());
    Place {
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

/// Of a port that a container declares.
fn judged(sockets: Vec<Socket>) -> PortBinds {
    let mut spoken = Spoken::default();
    spoken.declare(&DeclaredPort {
        protocol: HTTP.0,
        port: HTTP.1,
        name: Some("http".to_owned()),
    });
    let mut ports = spoken.seen(sockets, &place(Ztunnel::Needs));
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
        let port = judged(sockets.clone());
        assert_eq!(port.kind(), kind, "{sockets:?}");
        assert_eq!(port.warnings().collect::<Vec<_>>(), warnings, "{sockets:?}");
        assert_eq!(port.changes().count(), 0, "{sockets:?}");
        assert_eq!(port.binds.len(), sockets.len());
    }
}

#[test]
fn only_a_socket_that_takes_both_families_is_said_to() {
    let families = |sockets| {
        let binds = judged(sockets).binds;
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
    let changes = |sockets| judged(sockets).changes().collect::<Vec<_>>();
    assert_eq!(changes(vec![on_interface("0.0.0.0", 2)]), [Lost]);
    assert_eq!(changes(vec![on_interface("10.0.0.2", 2)]), [Lost]);
    // Of the same family another socket takes it.
    let both = vec![on_interface("0.0.0.0", 2), at("0.0.0.0")];
    assert_eq!(changes(both), []);
    let no_help = vec![on_interface("0.0.0.0", 2), on_interface("0.0.0.0", 1)];
    assert_eq!(changes(no_help), [Lost]);
    let other_family = vec![on_interface("0.0.0.0", 2), only_v6()];
    assert_eq!(changes(other_family), [Lost]);
    // Nobody but the pod itself gets there either way.
    for address in ["127.0.0.1", "0.0.0.0", "10.0.0.2"] {
        let port = judged(vec![on_interface(address, 1)]);
        assert_eq!(port.kind(), BindKind::Localhost);
        assert_eq!(port.changes().count(), 0);
    }
}

#[test]
fn ports_that_ztunnel_needs_are_taken_from_it_and_its_own_are_no_applications() {
    let sockets = || {
        let taken = [15001, 15006, 15008, 15053].map(|port| (Protocol::Tcp, port));
        let taken = taken
            .into_iter()
            .chain([(Protocol::Udp, 15053), (Protocol::Udp, 15008)]);
        taken.map(|port| socket(port, "::")).collect::<Vec<_>>()
    };
    let seen = |ztunnel| {
        let ports = Spoken::default()
            .seen(sockets(), &place(ztunnel))
            .into_iter();
        ports
            .map(|port| (port.port, port.changes().collect::<Vec<_>>()))
            .collect::<Vec<_>>()
    };
    let needed = [15001, 15006, 15008].map(|port| (port, vec![PortTaken]));
    let others = [15053, 15008, 15053].map(|port| (port, vec![]));
    assert_eq!(seen(Ztunnel::Needs), [needed, others].concat());
    assert_eq!(seen(Ztunnel::Has), [(15008, vec![])]);
    let all = [15001, 15006, 15008, 15053, 15008, 15053].map(|port| (port, vec![]));
    assert_eq!(seen(Ztunnel::Never), all);
}

#[test]
fn who_speaks_of_a_port_is_told_and_a_port_of_nobody_is_not_warned_of() {
    let mut spoken = Spoken::default();
    for (port, name) in [(80, "http"), (80, "web")] {
        spoken.declare(&DeclaredPort {
            protocol: Protocol::Tcp,
            port,
            name: Some(name.to_owned()),
        });
    }
    spoken.lead((Protocol::Tcp, 81), "shop");
    spoken.lead((Protocol::Udp, 53), "names");
    let sockets = vec![
        socket((Protocol::Tcp, 9), "127.0.0.1"),
        socket((Protocol::Tcp, 81), "127.0.0.1"),
        socket((Protocol::Udp, 53), "127.0.0.1"),
    ];
    let ports = spoken.clone().seen(sockets, &place(Ztunnel::Needs));
    let told: Vec<_> = ports
        .iter()
        .map(|it| (it.port, it.declared, it.warnings.len()))
        .collect();
    assert_eq!(
        told,
        [(9, false, 0), (80, true, 0), (81, false, 1), (53, false, 0)]
    );
    let named = |port: &PortBinds| [port.names.clone(), port.services.clone()].concat();
    let named: Vec<_> = ports.iter().map(named).collect();
    assert_eq!(named, [&[][..], &["http", "web"], &["shop"], &["names"]]);
    // Nothing is claimed of what was not seen.
    let unseen = spoken.unseen();
    assert_eq!(unseen.len(), 3);
    assert!(
        unseen
            .iter()
            .all(|port| port.kind() == BindKind::Unspecified)
    );
}

#[test]
fn what_netconfig_says_is_checked() {
    let listener = netconfig::Listener {
        protocol: netconfig::Protocol::Tcp.into(),
        address: "::".to_owned(),
        port: 8080,
        dual_stack: true,
        uid: 0,
        interface_index: 0,
    };
    assert_eq!(Socket::try_from(listener.clone()), Ok(at("::")));
    let odd = [
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
    assert!(odd.into_iter().all(|it| Socket::try_from(it).is_err()));
}
