//! Creates two temporary netns connected by a veth.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
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
use socket2::{Domain, Socket as Plain, Type};

use crate::{
    family::Family,
    inspect::Protocol,
    marks::FROM_ZTUNNEL,
    netlink::{
        KernelError, Socket,
        rt::{SCOPE_LINK, TYPE_UNICAST},
    },
    sysctl::Sysctls,
};

pub(super) const APPLICATION: u16 = 8080;

/// The timeout of a connection, which takes no time on the same machine unless the load is high.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// IFA_F_NODAD of linux/if_addr.h, which makes an address usable at once.
const NODAD: u8 = 2;
/// RT_TABLE_MAIN of linux/rtnetlink.h.
const MAIN: u8 = 254;
/// The name of both ends of the veth.
const INTERFACE: &str = "eth0";
/// The name given by the kernel to the other end of the first veth in a netns.
const OTHER_END: &str = "veth0";

#[derive(Debug, thiserror::Error)]
pub enum TestNetworkError {
    #[error("cannot create a netns")]
    Create(#[from] CreateError),
    #[error("cannot enter a netns of the self-test")]
    Enter(#[from] EnterError),
    #[error("cannot open a socket in a netns of the self-test")]
    Socket(#[from] io::Error),
    #[error("cannot write a sysctl in a netns of the self-test")]
    Sysctl(#[source] io::Error),
    #[error("the kernel refused")]
    Kernel(#[from] KernelError),
}

pub(super) struct TestNetwork {
    pub(super) pod: Netns,
    pub(super) peer: Netns,
    pub(super) has_ipv6: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Pod,
    Peer,
}

/// The sender of a packet. A ztunnel and the peer may use another source address than their own.
#[derive(Clone, Copy)]
pub(super) enum Sender {
    Pod,
    PodUdp,
    Ztunnel(Option<IpAddr>),
    Peer(Option<IpAddr>),
}

/// A sent packet, with the socket that must stay open for the packet to arrive.
pub(super) struct Sent {
    pub(super) from: SocketAddr,
    _socket: Plain,
}

/// Returns the pod's address, a documentation address (RFC 5737, RFC 3849).
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

/// Creates a netns with nothing but `lo`, which suffices to apply rules.
pub(super) fn netns_with_loopback() -> Result<Netns, TestNetworkError> {
    let netns = Netns::create()?;
    NetnsConfig::open(&netns)?.set_up("lo")?;
    Ok(netns)
}

impl TestNetwork {
    pub(super) fn new(probe_sources: &[IpAddr]) -> Result<Self, TestNetworkError> {
        let (pod, peer) = (Netns::create()?, Netns::create()?);
        // The peer listens on the DNS port, for which netconfig has no capability.
        peer.within(|| {
            Sysctls::default()
                .open_for_netns()?
                .allow_privileged_ports()
        })?
        .map_err(TestNetworkError::Sysctl)?;
        let has_ipv6 = std::path::Path::new("/proc/sys/net/ipv6").exists();
        let network = Self {
            pod,
            peer,
            has_ipv6,
        };
        let mut inside = NetnsConfig::open(&network.pod)?;
        let mut outside = NetnsConfig::open(&network.peer)?;
        inside.add_veth(&network.peer)?;
        for netns in [&mut inside, &mut outside] {
            netns.set_up("lo")?;
            netns.set_up(INTERFACE)?;
        }
        for family in network.families() {
            inside.add_address(pod_address(*family))?;
            outside.add_address(peer_address(*family))?;
            // Replies to probes need the default route.
            inside.add_default_route(*family)?;
        }
        let is_tried = |source: &&IpAddr| has_ipv6 || source.is_ipv4();
        for source in probe_sources.iter().filter(is_tried) {
            outside.add_address(*source)?;
        }
        Ok(network)
    }

    pub(super) fn families(&self) -> &'static [Family] {
        if self.has_ipv6 {
            &Family::ALL
        } else {
            &[Family::V4]
        }
    }

    pub(super) fn open_socket(
        &self,
        side: Side,
        protocol: Protocol,
        to: SocketAddr,
    ) -> io::Result<Plain> {
        let netns = match side {
            Side::Pod => &self.pod,
            Side::Peer => &self.peer,
        };
        let kind = match protocol {
            Protocol::Tcp => Type::STREAM,
            Protocol::Udp => Type::DGRAM,
        };
        open_inside(netns, || Plain::new(Domain::for_address(to), kind, None))
    }

    pub(super) fn send(&self, from: Sender, to: (IpAddr, u16)) -> io::Result<Sent> {
        let to = SocketAddr::from(to);
        let (side, protocol, source) = match from {
            Sender::Pod => (Side::Pod, Protocol::Tcp, None),
            Sender::PodUdp => (Side::Pod, Protocol::Udp, None),
            Sender::Ztunnel(source) => (Side::Pod, Protocol::Tcp, source),
            Sender::Peer(source) => (Side::Peer, Protocol::Tcp, source),
        };
        let socket = self.open_socket(side, protocol, to)?;
        if let Sender::Ztunnel(_) = from {
            socket.set_mark(FROM_ZTUNNEL.value())?;
        }
        if let Some(source) = source {
            bind_source(&socket, source)?;
        }
        socket.connect_timeout(&to.into(), CONNECT_TIMEOUT)?;
        if protocol == Protocol::Udp {
            socket.send(b"?")?;
        }
        let from = socket.local_addr()?.as_socket();
        Ok(Sent {
            from: from.ok_or(io::ErrorKind::AddrNotAvailable)?,
            _socket: socket,
        })
    }
}

/// Opens a socket, which belongs to the given netns even when used from another netns.
fn open_inside<T>(netns: &Netns, open: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    netns.within(open).map_err(io::Error::other)?
}

fn bind_source(socket: &Plain, source: IpAddr) -> io::Result<()> {
    match source {
        IpAddr::V4(_) => socket.set_ip_transparent_v4(true)?,
        IpAddr::V6(_) => socket.set_freebind_v6(true)?,
    }
    socket.bind(&SocketAddr::new(source, 0).into())
}

struct NetnsConfig<'a> {
    netns: &'a Netns,
    socket: Socket,
}

impl<'a> NetnsConfig<'a> {
    fn open(netns: &'a Netns) -> Result<Self, TestNetworkError> {
        let socket = open_inside(netns, || Socket::open(SockProtocol::NetlinkRoute))?;
        Ok(Self { netns, socket })
    }

    fn index(&self, name: &str) -> Result<u32, TestNetworkError> {
        let index = self.netns.within(|| nix::net::if_::if_nametoindex(name))?;
        Ok(index.map_err(io::Error::from)?)
    }

    /// Creates a veth and moves the other end to `there`.
    fn add_veth(&mut self, there: &Netns) -> Result<(), TestNetworkError> {
        let request = rt_link::Request::new().set_create().set_excl();
        let mut request = request.op_newlink_do(&Ifinfomsg::new());
        let attributes = request.encode().push_ifname_bytes(INTERFACE.as_bytes());
        drop(attributes.nested_linkinfo().push_kind(c"veth").end_nested());
        self.socket.execute("create a veth", &request)?;
        let header = Ifinfomsg {
            ifi_index: i32::try_from(self.index(OTHER_END)?).unwrap_or(0),
            ..Ifinfomsg::new()
        };
        let mut request = rt_link::Request::new().op_setlink_do(&header);
        let there = u32::try_from(there.as_fd().as_raw_fd()).unwrap_or(u32::MAX);
        let attributes = request.encode().push_ifname_bytes(INTERFACE.as_bytes());
        drop(attributes.push_net_ns_fd(there));
        Ok(self
            .socket
            .execute("move the other end of the veth", &request)?)
    }

    fn set_up(&mut self, name: &str) -> Result<(), TestNetworkError> {
        let index = self.index(name)?;
        Ok(self.socket.set_up(index)?)
    }

    /// Adds the address of the pod or the peer with its network, and any other address alone.
    fn add_address(&mut self, address: IpAddr) -> Result<(), TestNetworkError> {
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
        Ok(self.socket.execute("add an address", &request)?)
    }

    fn add_default_route(&mut self, family: Family) -> Result<(), TestNetworkError> {
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
        Ok(self.socket.execute("add a default route", &request)?)
    }
}
