use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener},
};

use socket2::{Domain, Socket, Type};
use tokio::{runtime::Handle, task::JoinSet};
use zds_conformance::netns::MARK;

/// Opens listeners on all ports, or none.
pub(crate) fn listen(ports: &[u16], fault: &str) -> io::Result<Vec<TcpListener>> {
    let addresses: &[IpAddr] = match fault {
        "loopback-only" => &[
            IpAddr::V4(Ipv4Addr::LOCALHOST),
            IpAddr::V6(Ipv6Addr::LOCALHOST),
        ],
        "v4-only" => &[IpAddr::V4(Ipv4Addr::UNSPECIFIED)],
        _ => &[IpAddr::V6(Ipv6Addr::UNSPECIFIED)],
    };
    let sockets = ports
        .iter()
        .flat_map(|port| addresses.iter().map(|address| (*address, *port)));
    sockets
        .map(|address| listen_on(address.into(), fault))
        .collect()
}

fn listen_on(address: SocketAddr, fault: &str) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    if address.is_ipv6() {
        socket.set_only_v6(fault == "v6-only" || !address.ip().is_unspecified())?;
    }
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(fault != "no-reuseport")?;
    if fault != "unmarked-listeners" {
        socket.set_mark(MARK)?;
    }
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(16)?;
    Ok(socket.into())
}

/// Accepts connections and closes each one at once, until the returned tasks are dropped.
pub(crate) fn accept(listeners: Vec<TcpListener>, runtime: &Handle) -> io::Result<JoinSet<()>> {
    let _within = runtime.enter();
    let mut tasks = JoinSet::new();
    for listener in listeners {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        tasks.spawn(async move { while listener.accept().await.is_ok() {} });
    }
    Ok(tasks)
}
