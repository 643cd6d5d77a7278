use std::io;
use std::net::{SocketAddr, TcpStream as StdTcpStream};
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::{TcpSocket, TcpStream};

use crate::enter::Inside;

/// The mark of ztunnel's own sockets, whose packets the redirection exempts. Other sockets get nothing on ztunnel's
/// ports.
pub(crate) const MARK: u32 = 0x539;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The destination of a connection, and the source address to keep.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Upstream {
    pub(crate) destination: SocketAddr,
    /// The address of the client; if unset, the pod's own address is used.
    pub(crate) client: Option<SocketAddr>,
}

impl Upstream {
    pub(crate) async fn connect(self, inside: &Inside, mark: u32) -> io::Result<TcpStream> {
        let socket = inside.run(move || self.socket(mark)).await?;
        let connect = TcpSocket::from_std_stream(socket).connect(self.destination);
        tokio::time::timeout(CONNECT_TIMEOUT, connect).await?
    }

    fn socket(self, mark: u32) -> io::Result<StdTcpStream> {
        let domain = Domain::for_address(self.destination);
        let socket = Socket::new(domain, Type::STREAM, Some(Protocol::TCP))?;
        socket.set_nonblocking(true)?;
        socket.set_tcp_nodelay(true)?;
        socket.set_mark(mark)?;
        if let Some(client) = self.client {
            keep_source(&socket, client)?;
        }
        Ok(socket.into())
    }
}

/// Binds the socket to the client's address, which needs a transparent socket because the address is not the pod's.
fn keep_source(socket: &Socket, client: SocketAddr) -> io::Result<()> {
    if client.is_ipv4() {
        socket.set_ip_transparent_v4(true)?;
    } else {
        socket.set_ip_transparent_v6(true)?;
    }
    // The socket does not keep the client's port: its tuple would equal the client's in conntrack, which would redirect
    // the connection to our listener again.
    let mut source = client;
    source.set_port(0);
    socket.bind(&source.into())
}
