//! Network namespaces, which stand for pods. The kit itself enters no namespace: at creation, a thread was moved into
//! each, and stays there.

use std::{
    fs::{self, File},
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::fs::MetadataExt as _,
    },
    path::PathBuf,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    libc,
    sched::{CloneFlags, unshare},
    sys::socket::{
        AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recv, sendto,
        socket,
    },
    unistd::{Uid, setfsuid},
};
use socket2::{Domain, Socket, Type};

/// The ports of ztunnel's listeners in a pod: outbound, inbound plaintext, and HBONE.
pub const PORTS: [u16; 3] = [15001, 15006, 15008];

/// The mark of ztunnel's sockets.
const MARK: u32 = 0x539;

const POLL_INTERVAL: Duration = Duration::from_millis(5);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Listening {
    pub port: u16,
    pub address: IpAddr,
    /// The user whose process opened the socket.
    pub uid: u32,
    /// The inode of the socket: another inode means another socket.
    pub inode: u64,
}

type Job = Box<dyn FnOnce() + Send>;

/// A network namespace, alive as long as this value or another descriptor.
#[derive(Debug)]
pub struct Netns {
    file: File,
    thread: PathBuf,
    jobs: mpsc::Sender<Job>,
}

impl Netns {
    /// Creates a netns whose loopback interface is up, which fails without root.
    pub fn make() -> io::Result<Self> {
        let (jobs, queue) = mpsc::channel::<Job>();
        let (made, making) = mpsc::channel();
        let thread = thread::Builder::new().stack_size(128 * 1024);
        thread.spawn(move || {
            let outcome = move_out();
            let inside = outcome.is_ok();
            drop(made.send(outcome));
            if inside {
                queue.into_iter().for_each(|job| job());
            }
        })?;
        let (file, thread) = making.recv().map_err(io::Error::other)??;
        Ok(Self { file, thread, jobs })
    }

    pub fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let (done, outcome) = mpsc::channel();
        let job: Job = Box::new(move || drop(done.send(job())));
        self.jobs
            .send(job)
            .map_err(|_| io::Error::other("a netns's thread ended"))?;
        outcome.recv().map_err(io::Error::other)?
    }

    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Returns `st_dev` and `st_ino` of the netns.
    pub fn identity(&self) -> io::Result<(u64, u64)> {
        let metadata = self.file.metadata()?;
        Ok((metadata.dev(), metadata.ino()))
    }

    /// Returns a path by which other processes can open the netns while this value lives.
    pub fn path(&self) -> PathBuf {
        self.thread.join("ns/net")
    }

    /// Returns the listening sockets of both IP versions, sorted by port.
    pub fn listening(&self) -> io::Result<Vec<Listening>> {
        let queues = self.listeners()?.into_iter();
        let mut found: Vec<_> = queues.map(|(listening, _)| listening).collect();
        found.sort_unstable();
        Ok(found)
    }

    /// Returns the listening sockets, each with the length of its accept queue.
    fn listeners(&self) -> io::Result<Vec<(Listening, u32)>> {
        let read = |name| fs::read_to_string(self.thread.join(name));
        let v4 = read("net/tcp")?;
        // A kernel without IPv6 has no such file.
        let v6 = read("net/tcp6").unwrap_or_default();
        Ok(v4.lines().chain(v6.lines()).filter_map(listener).collect())
    }

    /// Returns the listening ports of ztunnel, each once: a port may have a listener per family.
    pub fn ports(&self) -> io::Result<Vec<u16>> {
        let ports = self.listening()?.into_iter().map(|found| found.port);
        let mut ports: Vec<_> = ports.filter(|port| PORTS.contains(port)).collect();
        ports.dedup();
        Ok(ports)
    }

    /// Returns the ports of ztunnel with unaccepted connections, and the number of these connections.
    pub fn unaccepted(&self) -> io::Result<Vec<(u16, u32)>> {
        let queues = self.listeners()?.into_iter();
        let queues = queues.map(|(found, waiting)| (found.port, waiting));
        let mut queues: Vec<_> = queues
            .filter(|(port, waiting)| PORTS.contains(port) && *waiting > 0)
            .collect();
        queues.sort_unstable();
        Ok(queues)
    }

    /// Binds a second socket to the address of a listener, as the listener's user, and closes the socket.
    pub fn share(&self, found: Listening) -> io::Result<()> {
        self.run(move || {
            let address = SocketAddr::new(found.address, found.port);
            // Only this thread's user changes; the kernel compares the users of the two sockets.
            let own = setfsuid(Uid::from_raw(found.uid));
            let socket = Socket::new(Domain::for_address(address), Type::STREAM, None);
            setfsuid(own);
            let socket = socket?;
            socket.set_reuse_port(true)?;
            socket.bind(&address.into())
        })
    }

    /// Returns whether the netns has an IPv6 address, at least `::1`.
    pub fn has_ipv6(&self) -> bool {
        fs::read_to_string(self.thread.join("net/if_inet6")).is_ok_and(|text| !text.is_empty())
    }

    /// Returns the ports of ztunnel whose listeners lack ztunnel's mark. The kernel shows marks to root.
    pub fn unmarked_ports(&self) -> io::Result<Vec<u16>> {
        let read = || Ok([marks(libc::AF_INET)?, marks(libc::AF_INET6)?].concat());
        let marks = self.run(read)?.into_iter();
        let lacking = marks.filter(|(port, mark)| PORTS.contains(port) && *mark != Some(MARK));
        let mut ports: Vec<_> = lacking.map(|(port, _)| port).collect();
        ports.sort_unstable();
        Ok(ports)
    }

    /// Waits until exactly the `wanted` ports of ztunnel listen; returns the last observed ports.
    pub fn await_ports(&self, wanted: &[u16], within: Duration) -> io::Result<Vec<u16>> {
        let end = Instant::now() + within;
        loop {
            let ports = self.ports()?;
            if ports == wanted || Instant::now() >= end {
                return Ok(ports);
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Takes the HBONE port: no proxy can start in the netns until the listener is dropped.
    pub fn take_hbone_port(&self) -> io::Result<TcpListener> {
        self.run(|| TcpListener::bind((Ipv6Addr::UNSPECIFIED, 15008)))
    }
}

fn move_out() -> io::Result<(File, PathBuf)> {
    unshare(CloneFlags::CLONE_NEWNET)?;
    set_loopback_up()?;
    let thread = format!(
        "/proc/{}/task/{}",
        std::process::id(),
        nix::unistd::gettid()
    );
    let file = File::open("/proc/thread-self/ns/net")?;
    Ok((file, thread.into()))
}

/// Sets the loopback interface up, by `RTM_NEWLINK` for interface 1 with `IFF_UP` (rtnetlink(7)), because a pod
/// otherwise has no 127.0.0.1.
fn set_loopback_up() -> io::Result<()> {
    let netlink = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkRoute,
    )?;
    let mut request = Vec::new();
    // The header nlmsghdr has length, type RTM_NEWLINK, flags REQUEST and ACK, sequence, and port.
    request.extend(32_u32.to_ne_bytes());
    request.extend(16_u16.to_ne_bytes());
    request.extend(5_u16.to_ne_bytes());
    request.extend([0; 8]);
    // The body ifinfomsg has family, padding, type, index, flags, and the mask of the flags.
    request.extend([0; 4]);
    request.extend(1_u32.to_ne_bytes());
    request.extend(1_u32.to_ne_bytes());
    request.extend(1_u32.to_ne_bytes());
    use std::os::fd::AsRawFd as _;
    let kernel = NetlinkAddr::new(0, 0);
    sendto(netlink.as_raw_fd(), &request, &kernel, MsgFlags::empty())?;
    let mut answer = [0; 128];
    recv(netlink.as_raw_fd(), &mut answer, MsgFlags::empty())?;
    // The answer is an nlmsgerr, in which the negative errno follows the header.
    let code = answer.get(16..20).and_then(|code| code.try_into().ok());
    match code.map(i32::from_ne_bytes) {
        Some(0) => Ok(()),
        code => Err(Errno::from_raw(code.unwrap_or_default().saturating_neg()).into()),
    }
}

/// Returns the port and the mark of each TCP listener of an address family, by `SOCK_DIAG_BY_FAMILY` (sock_diag(7)).
fn marks(family: libc::c_int) -> io::Result<Vec<(u16, Option<u32>)>> {
    let netlink = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkSockDiag,
    )?;
    let mut request = Vec::new();
    // The header nlmsghdr has length, type SOCK_DIAG_BY_FAMILY, flags REQUEST and DUMP, sequence, and port.
    request.extend(72_u32.to_ne_bytes());
    request.extend(20_u16.to_ne_bytes());
    request.extend(0x301_u16.to_ne_bytes());
    request.extend([0; 8]);
    // The body inet_diag_req_v2 has family, protocol TCP, extensions, padding, states (LISTEN), and an empty id.
    request.extend([u8::try_from(family).unwrap_or_default(), 6, 0, 0]);
    request.extend((1_u32 << 10).to_ne_bytes());
    request.extend([0; 48]);
    use std::os::fd::AsRawFd as _;
    let kernel = NetlinkAddr::new(0, 0);
    sendto(netlink.as_raw_fd(), &request, &kernel, MsgFlags::empty())?;
    let mut found = Vec::new();
    loop {
        let mut answer = vec![0; 32 * 1024];
        let length = recv(netlink.as_raw_fd(), &mut answer, MsgFlags::empty())?;
        let mut rest = answer.get(..length).unwrap_or_default();
        while let Some((kind, message, after)) = split_message(rest) {
            if kind != 20 {
                // NLMSG_DONE or NLMSG_ERROR, which an unknown address family gets.
                return Ok(found);
            }
            found.extend(diagnosed(message));
            rest = after;
        }
    }
}

/// Splits off a netlink message, as its type and its body.
fn split_message(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let length = u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?);
    let kind = u16::from_ne_bytes(bytes.get(4..6)?.try_into().ok()?);
    let length = usize::try_from(length).ok()?;
    let next = length.next_multiple_of(4).min(bytes.len());
    Some((kind, bytes.get(16..length)?, bytes.get(next..)?))
}

/// Reads an inet_diag_msg: the local port, and the mark among the attributes.
fn diagnosed(message: &[u8]) -> Option<(u16, Option<u32>)> {
    const BODY: usize = 72;
    const INET_DIAG_MARK: u16 = 15;
    let port = u16::from_be_bytes(message.get(4..6)?.try_into().ok()?);
    let mut rest = message.get(BODY..)?;
    while let Some(header) = rest.get(..4) {
        let length = usize::from(u16::from_ne_bytes(header.get(..2)?.try_into().ok()?));
        let kind = u16::from_ne_bytes(header.get(2..4)?.try_into().ok()?);
        if kind == INET_DIAG_MARK {
            let mark = rest.get(4..8)?.try_into().ok()?;
            return Some((port, Some(u32::from_ne_bytes(mark))));
        }
        rest = rest.get(length.next_multiple_of(4).max(4)..)?;
    }
    Some((port, None))
}

/// Parses a line of `/proc/net/tcp`; returns `None` unless the line is a listener's (state 0A). The receive queue of a
/// listener is the number of connections that wait for an accept.
fn listener(line: &str) -> Option<(Listening, u32)> {
    let mut fields = line.split_whitespace();
    let (local, state) = (fields.nth(1)?, fields.nth(1)?);
    let (_, waiting) = fields.next()?.split_once(':')?;
    let waiting = u32::from_str_radix(waiting, 16).ok()?;
    let uid = fields.nth(2)?.parse().ok()?;
    let inode = fields.nth(1)?.parse().ok()?;
    let (address, port) = local.split_once(':')?;
    let found = Listening {
        port: u16::from_str_radix(port, 16).ok()?,
        address: parse_address(address)?,
        uid,
        inode,
    };
    (state == "0A").then_some((found, waiting))
}

/// Parses an address of `/proc/net/tcp` or `/proc/net/tcp6`: one number per 32 bits, in the host's byte order.
fn parse_address(text: &str) -> Option<IpAddr> {
    let words = text.as_bytes().chunks(8);
    let words = words.map(|word| u32::from_str_radix(str::from_utf8(word).ok()?, 16).ok());
    let bytes: Vec<_> = words
        .map(|word| word.map(u32::to_ne_bytes))
        .collect::<Option<Vec<_>>>()?
        .concat();
    let v4 = <[u8; 4]>::try_from(&*bytes).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(&*bytes).map(IpAddr::from))
        .ok()
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn a_listener_is_told_from_a_connection() {
        let line = "   0: 00000000:3AA0 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0000 100 0 0 10 0";
        let (found, waiting) = listener(line).unwrap();
        assert_eq!((found.port, found.inode, waiting), (15008, 4711, 0));
        assert_eq!(found.address, IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        let loopback = "   1: 0100007F:3AA0 00000000:0000 0A 00000000:00000003 00:00000000 00000000  1337        0 4712 1 0 100 0 0 10 0";
        let (found, waiting) = listener(loopback).unwrap();
        assert_eq!((found.uid, found.inode, waiting), (1337, 4712, 3));
        assert_eq!(found.address, IpAddr::V4(Ipv4Addr::LOCALHOST));
        let v6 = loopback.replace("0100007F:", "00000000000000000000000001000000:");
        assert_eq!(
            listener(&v6).unwrap().0.address,
            IpAddr::V6(Ipv6Addr::LOCALHOST)
        );
        assert!(listener(&line.replace(" 0A ", " 01 ")).is_none());
    }
}
