use std::{io, net::TcpListener};

use socket2::{Domain, Socket, Type};

/// Opens listeners on all ports, or none.
pub(crate) fn listen(ports: &[u16], mark: u32) -> io::Result<Vec<TcpListener>> {
    ports.iter().map(|port| listen_on(*port, mark)).collect()
}

fn listen_on(port: u16, mark: u32) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::IPV6, Type::STREAM, None)?;
    socket.set_only_v6(false)?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    socket.set_mark(mark)?;
    socket.bind(&std::net::SocketAddr::from((std::net::Ipv6Addr::UNSPECIFIED, port)).into())?;
    socket.listen(16)?;
    Ok(socket.into())
}
