//! Two netns with a veth between them, neither of which is anybody's.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket},
    os::fd::{AsFd as _, AsRawFd as _},
    time::Duration,
};

use inpod_linux::{CreateError, EnterError, Netns};
use netlink_bindings::{
    rt_addr::{self, Ifaddrmsg},
    rt_link::{self, Ifinfomsg},
    rt_route::{self, Rtmsg},
};
use nix::sys::socket::SockProtocol;
use socket2::{Domain, Protocol, Socket as Plain, Type};

use crate::{
    family::Family,
    marks::FROM_ZTUNNEL,
    netlink::{
        KernelError, Socket,
        route::{SCOPE_LINK, TYPE_UNICAST},
    },
};

/// Where the application listens.
pub(super) const APPLICATION: u16 = 8080;

/// How long a connection or an answer may take: in the same machine, without load to speak of, it takes no time.
const PATIENCE: Duration = Duration::from_secs(2);

/// IFF_UP of linux/if.h.
const UP: u32 = 1;
/// IFA_F_NODAD of linux/if_addr.h: usable at once.
const NODAD: u8 = 2;
/// RT_TABLE_MAIN of linux/rtnetlink.h.
const MAIN: u8 = 254;
/// The name of either end of the veth.
const INTERFACE: &str = "eth0";
/// As the kernel names the other end of the first veth of a netns.
const OTHER_END: &str = "veth0";

/// Why there is no world to test in.
#[derive(Debug, thiserror::Error)]
pub enum WorldError {
    /// A netns.
    #[error("cannot create a netns")]
    Create(#[from] CreateError),
    /// A netns that was made.
    #[error("cannot enter a netns of the self-test")]
    Enter(#[from] EnterError),
    /// A socket.
    #[error("cannot open a socket in a netns of the self-test")]
    Socket(#[from] io::Error),
    /// An interface, an address or a route.
    #[error("the kernel refused")]
    Kernel(#[from] KernelError),
}

/// See the module.
pub(super) struct World {
    pub(super) pod: Netns,
    pub(super) peer: Netns,
    pub(super) has_ipv6: bool,
}

/// What is sent. Where it goes to is an address and a port.
#[derive(Clone, Copy)]
pub(super) enum Packet {
    /// A connection of the application's.
    FromPod((IpAddr, u16)),
    /// A connection of ztunnel's, which may speak for another.
    FromZtunnel {
        source: Option<IpAddr>,
        to: (IpAddr, u16),
    },
    /// A connection from outside.
    FromPeer {
        source: Option<IpAddr>,
        to: (IpAddr, u16),
    },
    /// A datagram of the application's.
    Question((IpAddr, u16)),
}

/// What was sent: from where, and what has to be kept for it to arrive.
pub(super) struct Sent {
    pub(super) from: SocketAddr,
    _connection: Connection,
}

enum Connection {
    Tcp { _stream: TcpStream },
    Udp { _socket: UdpSocket },
}

/// Addresses that are for documentation alone (RFC 5737, RFC 3849).
pub(super) fn pod_address(family: Family) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::new(192, 0, 2, 1).into(),
        Family::V6 => Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into(),
    }
}

pub(super) fn peer_address(family: Family) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::new(192, 0, 2, 2).into(),
        Family::V6 => Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 2).into(),
    }
}

/// A netns with nothing in it but `lo`, which is up: as much as rules need.
pub(super) fn bare() -> Result<Netns, WorldError> {
    let netns = Netns::create()?;
    Side::open(&netns)?.up("lo")?;
    Ok(netns)
}

impl World {
    pub(super) fn new(probe_sources: &[IpAddr]) -> Result<Self, WorldError> {
        let (pod, peer) = (Netns::create()?, Netns::create()?);
        let has_ipv6 = std::path::Path::new("/proc/sys/net/ipv6").exists();
        let world = Self {
            pod,
            peer,
            has_ipv6,
        };
        let mut inside = Side::open(&world.pod)?;
        let mut outside = Side::open(&world.peer)?;
        inside.add_veth(&world.peer)?;
        for side in [&mut inside, &mut outside] {
            side.up("lo")?;
            side.up(INTERFACE)?;
        }
        for family in world.families() {
            inside.add_address(pod_address(*family))?;
            outside.add_address(peer_address(*family))?;
            // Answers to probes have to go somewhere.
            inside.add_default_route(*family)?;
        }
        let is_tried = |source: &&IpAddr| has_ipv6 || source.is_ipv4();
        for source in probe_sources.iter().filter(is_tried) {
            outside.add_address(*source)?;
        }
        Ok(world)
    }

    pub(super) fn families(&self) -> &'static [Family] {
        if self.has_ipv6 {
            &Family::ALL
        } else {
            &[Family::V4]
        }
    }

    pub(super) fn send(&self, packet: Packet) -> io::Result<Sent> {
        match packet {
            Packet::FromPod(to) => connect(&self.pod, false, None, to.into()),
            Packet::FromZtunnel { source, to } => connect(&self.pod, true, source, to.into()),
            Packet::FromPeer { source, to } => connect(&self.peer, false, source, to.into()),
            Packet::Question(to) => self.ask(to.into()),
        }
    }

    fn ask(&self, to: SocketAddr) -> io::Result<Sent> {
        let from = SocketAddr::from((pod_address(Family::of(to.ip())), 0));
        let socket = inside(&self.pod, || UdpSocket::bind(from))?;
        socket.send_to(b"?", to)?;
        Ok(Sent {
            from: socket.local_addr()?,
            _connection: Connection::Udp { _socket: socket },
        })
    }
}

/// A socket belongs to the netns in which it was opened; what is done with it later is done from home.
pub(super) fn inside<T>(netns: &Netns, open: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    netns.within(open).map_err(io::Error::other)?
}

fn connect(
    netns: &Netns,
    is_ztunnels: bool,
    source: Option<IpAddr>,
    to: SocketAddr,
) -> io::Result<Sent> {
    let socket = inside(netns, || {
        Plain::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP))
    })?;
    if is_ztunnels {
        socket.set_mark(FROM_ZTUNNEL.value())?;
    }
    if let Some(source) = source {
        speak_for(&socket, source)?;
    }
    socket.connect_timeout(&to.into(), PATIENCE)?;
    let stream = TcpStream::from(socket);
    Ok(Sent {
        from: stream.local_addr()?,
        _connection: Connection::Tcp { _stream: stream },
    })
}

fn speak_for(socket: &Plain, source: IpAddr) -> io::Result<()> {
    match source {
        IpAddr::V4(_) => socket.set_ip_transparent_v4(true)?,
        IpAddr::V6(_) => socket.set_freebind_v6(true)?,
    }
    socket.bind(&SocketAddr::new(source, 0).into())
}

/// Interfaces, addresses and routes of one netns.
struct Side<'a> {
    netns: &'a Netns,
    socket: Socket,
}

impl<'a> Side<'a> {
    fn open(netns: &'a Netns) -> Result<Self, WorldError> {
        let socket = inside(netns, || Socket::open(SockProtocol::NetlinkRoute))?;
        Ok(Self { netns, socket })
    }

    fn index(&self, name: &str) -> Result<u32, WorldError> {
        let index = self.netns.within(|| nix::net::if_::if_nametoindex(name))?;
        Ok(index.map_err(io::Error::from)?)
    }

    /// Both ends are made here, and the one goes there.
    fn add_veth(&mut self, there: &Netns) -> Result<(), WorldError> {
        let request = rt_link::Request::new().set_create().set_excl();
        let mut request = request.op_newlink_do(&Ifinfomsg::new());
        let attributes = request.encode().push_ifname_bytes(INTERFACE.as_bytes());
        drop(attributes.nested_linkinfo().push_kind(c"veth").end_nested());
        self.socket.act("create a veth", &request)?;
        let header = self.header(OTHER_END, 0)?;
        let mut request = rt_link::Request::new().op_setlink_do(&header);
        let there = u32::try_from(there.as_fd().as_raw_fd()).unwrap_or(u32::MAX);
        let attributes = request.encode().push_ifname_bytes(INTERFACE.as_bytes());
        drop(attributes.push_net_ns_fd(there));
        Ok(self
            .socket
            .act("move the other end of the veth", &request)?)
    }

    fn up(&mut self, name: &str) -> Result<(), WorldError> {
        let header = self.header(name, UP)?;
        let request = rt_link::Request::new().op_setlink_do(&header);
        Ok(self.socket.act("set an interface up", &request)?)
    }

    fn header(&self, name: &str, flags: u32) -> Result<Ifinfomsg, WorldError> {
        Ok(Ifinfomsg {
            ifi_index: i32::try_from(self.index(name)?).unwrap_or(0),
            ifi_flags: flags,
            ifi_change: flags,
            ..Ifinfomsg::new()
        })
    }

    /// With the network of the pod and the peer, or, for any other, alone.
    fn add_address(&mut self, address: IpAddr) -> Result<(), WorldError> {
        let family = Family::of(address);
        let is_on_link = [pod_address(family), peer_address(family)].contains(&address);
        let header = Ifaddrmsg {
            ifa_family: family.number(),
            ifa_prefixlen: match (family, is_on_link) {
                (Family::V4, true) => 24,
                (Family::V4, false) => 32,
                (Family::V6, true) => 64,
                (Family::V6, false) => 128,
            },
            ifa_flags: if family == Family::V6 { NODAD } else { 0 },
            ifa_index: self.index(INTERFACE)?,
            ..Ifaddrmsg::new()
        };
        let request = rt_addr::Request::new().set_create();
        let mut request = request.op_newaddr_do(&header);
        drop(request.encode().push_local(address).push_address(address));
        Ok(self.socket.act("add an address", &request)?)
    }

    fn add_default_route(&mut self, family: Family) -> Result<(), WorldError> {
        let header = Rtmsg {
            rtm_family: family.number(),
            rtm_table: MAIN,
            rtm_scope: SCOPE_LINK,
            rtm_type: TYPE_UNICAST,
            ..Rtmsg::new()
        };
        let index = self.index(INTERFACE)?;
        let request = rt_route::Request::new().set_create();
        let mut request = request.op_newroute_do(&header);
        drop(request.encode().push_oif(index));
        Ok(self.socket.act("add a default route", &request)?)
    }
}
