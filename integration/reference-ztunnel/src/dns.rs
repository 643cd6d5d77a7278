//! Serves DNS in a pod without a resolver: each query gets SERVFAIL, which shows that it has arrived here.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::task::JoinSet;

use crate::listeners::{self, lacks_ipv6};
use crate::options::Fault;
use crate::upstream::MARK;

const PORT: u16 = 15053;

/// The length of a header (RFC 1035, section 4.1.1).
const HEADER: usize = 12;

/// The sockets of one loopback address.
pub(crate) struct Sockets {
    udp: std::net::UdpSocket,
    tcp: std::net::TcpListener,
}

impl Sockets {
    /// Opens the sockets in the netns of the calling thread, on the loopback address of each family that the netns has,
    /// like stock ztunnel.
    pub(crate) fn open() -> Result<Vec<Self>, (SocketAddr, io::Error)> {
        let mut all = Vec::new();
        for ip in [IpAddr::V4(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()] {
            let address = SocketAddr::new(ip, PORT);
            match Self::bind(address) {
                Err(error) if ip.is_ipv6() && lacks_ipv6(&error) => {}
                Err(error) => return Err((address, error)),
                Ok(sockets) => all.push(sockets),
            }
        }
        Ok(all)
    }

    fn bind(address: SocketAddr) -> io::Result<Self> {
        let udp = Socket::new(
            Domain::for_address(address),
            Type::DGRAM,
            Some(Protocol::UDP),
        )?;
        // A second ztunnel can take over, because both listen for a while.
        udp.set_reuse_port(true)?;
        udp.set_nonblocking(true)?;
        udp.set_mark(MARK)?;
        udp.bind(&address.into())?;
        Ok(Self {
            udp: udp.into(),
            tcp: listeners::listen(address, Fault::None)?,
        })
    }

    /// Answers queries until the future is dropped.
    pub(crate) async fn serve(self) {
        let served = async {
            let udp = UdpSocket::from_std(self.udp)?;
            let tcp = TcpListener::from_std(self.tcp)?;
            tokio::try_join!(serve_udp(udp), serve_tcp(tcp))
        };
        if let Err(error) = served.await {
            tracing::warn!(%error, "DNS has ended");
        }
    }
}

async fn serve_udp(socket: UdpSocket) -> io::Result<()> {
    let mut message = [0; 512];
    loop {
        let (length, client) = socket.recv_from(&mut message).await?;
        if let Some(answer) = refuse(message.get(..length).unwrap_or_default()) {
            drop(socket.send_to(&answer, client).await);
        }
    }
}

async fn serve_tcp(listener: TcpListener) -> io::Result<()> {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => drop(connections.spawn(serve_client(accepted?.0))),
            Some(_) = connections.join_next() => {}
        }
    }
}

/// Answers the queries of a client, each after its length (RFC 1035, section 4.2.2).
async fn serve_client(mut stream: TcpStream) -> io::Result<()> {
    loop {
        let length = stream.read_u16().await?;
        let mut message = vec![0; length.into()];
        stream.read_exact(&mut message).await?;
        if let Some(answer) = refuse(&message) {
            stream.write_u16(length).await?;
            stream.write_all(&answer).await?;
        }
    }
}

/// Returns the query as a response with the code SERVFAIL (2), or `None` if the message is no query.
fn refuse(query: &[u8]) -> Option<Vec<u8>> {
    let mut answer = query.to_vec();
    let header = answer.get_mut(..HEADER)?;
    let [_, _, flags, code, ..] = header else {
        return None;
    };
    if *flags & 0x80 != 0 {
        return None;
    }
    *flags |= 0x80;
    *code = *code & 0xf0 | 2;
    Some(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_is_refused_and_a_response_or_fragment_is_ignored() {
        let mut query = [0_u8; HEADER + 4];
        query[0] = 7;
        let answer = refuse(&query).expect("an answer");
        assert_eq!((answer.len(), answer[0]), (query.len(), 7));
        assert_eq!((answer[2] & 0x80, answer[3] & 0x0f), (0x80, 2));
        assert_eq!(refuse(&answer), None);
        assert_eq!(refuse(&query[..HEADER - 1]), None);
    }
}
