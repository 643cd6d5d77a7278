//! Inspection of netns, claimed or not.

use std::{
    net::{TcpListener, TcpStream, UdpSocket},
    os::fd::AsFd as _,
};

use inpod_proto::netconfig::v1::{
    FindingKind, InspectNetnsRequest, InspectNetnsResponse, ListListenersRequest,
    ListListenersResponse, Listener, Protocol, inspect_netns_request, list_listeners_request,
};
use inpod_types::Reason;
use nix::unistd::{Uid, fchown};
use socket2::{Domain, Socket, Type};
use tonic::{Code, Status};

use crate::harness::{Netconfig, netns_ref, pod_netns, refusal, wire};
use crate::support::Fresh;

async fn listeners(
    netconfig: &mut Netconfig,
    target: Option<list_listeners_request::Target>,
) -> Result<ListListenersResponse, Status> {
    let request = ListListenersRequest { target };
    Ok(netconfig.client.list_listeners(request).await?.into_inner())
}

async fn inspected(
    netconfig: &mut Netconfig,
    target: Option<inspect_netns_request::Target>,
) -> Result<InspectNetnsResponse, Status> {
    let request = InspectNetnsRequest {
        target,
        ..InspectNetnsRequest::default()
    };
    Ok(netconfig.client.inspect_netns(request).await?.into_inner())
}

fn by_claim() -> Option<list_listeners_request::Target> {
    wire("c1").map(list_listeners_request::Target::Sandbox)
}

fn by_path(fresh: &Fresh) -> Option<list_listeners_request::Target> {
    Some(list_listeners_request::Target::Netns(netns_ref(fresh)))
}

fn listener(protocol: Protocol, address: &str, port: u32) -> Listener {
    Listener {
        protocol: protocol.into(),
        address: address.to_owned(),
        port,
        dual_stack: false,
        uid: 0,
        interface_index: 0,
    }
}

fn listen_v6(only: bool, interface: Option<&'static str>, port: u16) -> Socket {
    let socket = Socket::new(Domain::IPV6, Type::STREAM, None).unwrap();
    socket.set_only_v6(only).unwrap();
    socket.bind_device(interface.map(str::as_bytes)).unwrap();
    let address = std::net::SocketAddr::from((std::net::Ipv6Addr::UNSPECIFIED, port));
    socket.bind(&address.into()).unwrap();
    socket.listen(1).unwrap();
    socket
}

#[tokio::test]
async fn listeners_are_told_with_all_that_is_known_of_them_by_claim_and_by_path() {
    let mut netconfig = Netconfig::start().await;
    let fresh = pod_netns();
    netconfig.claim("c1", &fresh).await.unwrap();
    let index = fresh.run(|| nix::net::if_::if_nametoindex("eth0").unwrap());
    let _open = fresh.run(|| {
        let foreign = TcpListener::bind("10.9.0.1:8080").unwrap();
        fchown(foreign.as_fd(), Some(Uid::from_raw(1337)), None).unwrap();
        let connected = TcpStream::connect("10.9.0.1:8080").unwrap();
        let v6 = [
            listen_v6(false, None, 15001),
            listen_v6(true, None, 15008),
            listen_v6(true, Some("eth0"), 9000),
        ];
        let mapped = TcpListener::bind("[::ffff:127.0.0.1]:9001").unwrap();
        let unconnected = UdpSocket::bind("127.0.0.1:15053").unwrap();
        let both = UdpSocket::bind("[::]:53").unwrap();
        let one_peer = UdpSocket::bind("127.0.0.1:5000").unwrap();
        one_peer.connect("127.0.0.1:15053").unwrap();
        (
            foreign,
            connected,
            v6,
            mapped,
            [unconnected, both, one_peer],
        )
    });
    let found = listeners(&mut netconfig, by_claim()).await.unwrap();
    assert!(!found.instance_id.is_empty());
    assert_eq!(found.netns, Some(fresh.netns.id().into()));
    let wanted = [
        Listener {
            uid: 1337,
            ..listener(Protocol::Tcp, "10.9.0.1", 8080)
        },
        Listener {
            interface_index: index,
            ..listener(Protocol::Tcp, "::", 9000)
        },
        listener(Protocol::Tcp, "127.0.0.1", 9001),
        Listener {
            dual_stack: true,
            ..listener(Protocol::Tcp, "::", 15001)
        },
        listener(Protocol::Tcp, "::", 15008),
        Listener {
            dual_stack: true,
            ..listener(Protocol::Udp, "::", 53)
        },
        listener(Protocol::Udp, "127.0.0.1", 15053),
    ];
    assert_eq!(found.listeners, wanted);
    assert!(netconfig.release("c1").await);
    let by_path = listeners(&mut netconfig, by_path(&fresh)).await.unwrap();
    assert_eq!(by_path, found);
    assert!(netconfig.claims().await.is_empty());
}

#[tokio::test]
async fn both_looks_are_refused_alike() {
    let mut netconfig = Netconfig::start().await;
    let own = crate::harness::at("/proc/self/ns/net");
    let nothing = crate::harness::at("/proc/999999999/ns/net");
    let refused = [
        (None, None, (Code::InvalidArgument, Reason::InvalidField)),
        (
            wire("c1").map(inspect_netns_request::Target::Sandbox),
            by_claim(),
            (Code::FailedPrecondition, Reason::ClaimUnknown),
        ),
        (
            Some(inspect_netns_request::Target::Netns(own.clone())),
            Some(list_listeners_request::Target::Netns(own)),
            (Code::PermissionDenied, Reason::NetnsIsHost),
        ),
        (
            Some(inspect_netns_request::Target::Netns(nothing.clone())),
            Some(list_listeners_request::Target::Netns(nothing)),
            (Code::NotFound, Reason::NetnsMissing),
        ),
    ];
    for (inspect, list, wanted) in refused {
        let status = inspected(&mut netconfig, inspect).await.unwrap_err();
        assert_eq!(refusal(&status), wanted, "{status}");
        let status = listeners(&mut netconfig, list).await.unwrap_err();
        assert_eq!(refusal(&status), wanted, "{status}");
    }
}

#[tokio::test]
async fn a_look_tells_direct_flows_and_what_stands_in_the_way() {
    let mut netconfig = Netconfig::start().await;
    let fresh = pod_netns();
    netconfig.claim("c1", &fresh).await.unwrap();
    let claimed = wire("c1").map(inspect_netns_request::Target::Sandbox);
    let clean = inspected(&mut netconfig, claimed.clone()).await.unwrap();
    assert_eq!((clean.direct_flows, clean.findings), (0, vec![]));
    let peer = Fresh::new();
    let task = peer
        .netns
        .path()
        .to_str()
        .unwrap()
        .split('/')
        .nth(4)
        .unwrap()
        .to_owned();
    fresh.ip(&format!("link set peer netns {task} name eth0"));
    peer.ip("addr add 10.9.0.2/24 dev eth0");
    peer.ip("link set eth0 up");
    let listener = peer.run(|| TcpListener::bind("10.9.0.2:80").unwrap());
    let _flow = fresh.run(|| TcpStream::connect("10.9.0.2:80").unwrap());
    let _accepted = listener.accept().unwrap();
    fresh.nft("add table ip theirs");
    fresh.nft("add chain ip theirs out { type nat hook output priority -150; }");
    fresh.nft("add rule ip theirs out tcp dport 80 redirect to :9999");
    let by_path = Some(inspect_netns_request::Target::Netns(netns_ref(&fresh)));
    for target in [claimed, by_path] {
        let seen = inspected(&mut netconfig, target).await.unwrap();
        assert_eq!((seen.direct_flows, seen.captured_flows), (1, 0));
        let [finding] = seen.findings.as_slice() else {
            panic!("{:?}", seen.findings);
        };
        assert_eq!(finding.kind(), FindingKind::NatChain);
        assert_eq!(finding.subject, "table ip theirs, chain out");
        assert!(finding.sentence.ends_with('.'), "{}", finding.sentence);
    }
}
