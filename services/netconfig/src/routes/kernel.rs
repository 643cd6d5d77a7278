//! Reads and writes routes, ip rules and addresses over rtnetlink.

use std::{
    collections::BTreeSet,
    io,
    net::IpAddr,
    thread,
    time::{Duration, Instant},
};

use inpod_types::NetnsId;
use netlink_bindings::rt_addr::{self, Ifaddrmsg, IterableAddrAttrs};
use nix::sys::socket::SockProtocol;

use super::{Item, Routing, is_relevant, is_relevant_route};
use crate::{
    family::Family,
    netlink::{
        KernelError, Socket,
        rt::{LOOPBACK, PROTOCOL, SeenRoute, forgive, is_new},
    },
    rules::sidecar::PASSTHROUGH_V6,
};

const TENTATIVE: u8 = 0x40; // IFA_F_TENTATIVE of linux/if_addr.h

/// The prefix length of a single IPv6 address.
const WHOLE: u8 = 128;

/// Limits the wait until the kernel routes to a new address, which takes less than a millisecond on an idle
/// machine.
const ADDRESS_TIMEOUT: Duration = Duration::from_secs(3);

/// The maximum of ip rules of a family, because a process of the pod with CAP_NET_ADMIN can add any number. For each
/// chunk of a dump, the kernel walks through all rules before (fib_nl_dumprule in net/core/fib_rules.c): a dump of
/// 300,000 rules takes more than 10 s.
const MAX_RULES: usize = 16_384;

const POLL_INTERVAL: Duration = Duration::from_micros(250);

#[derive(Debug)]
pub(crate) struct Routes(Socket);

impl Routes {
    /// Opens a socket in the calling thread's netns. Other threads can use the socket from any netns.
    pub(crate) fn open() -> io::Result<Self> {
        Socket::open(SockProtocol::NetlinkRoute).map(Self)
    }

    /// See [`Socket::set_claimed`].
    pub(crate) fn set_claimed(&mut self, netns: NetnsId) {
        self.0.set_claimed(netns);
    }

    pub(crate) fn read(&mut self) -> Result<Routing, KernelError> {
        let mut routing = Routing::default();
        for family in Family::ALL {
            let routes = self
                .0
                .routes(family, |it| is_relevant_route(&it).then_some(it))?;
            routing.routes.extend(routes);
            let keep = |it| is_relevant(&it).then_some(it);
            routing.rules.extend(self.0.rules(family, MAX_RULES, keep)?);
        }
        self.read_address(&mut routing)?;
        Ok(routing)
    }

    pub(crate) fn is_loopback_up(&mut self) -> Result<bool, KernelError> {
        self.0.is_up(LOOPBACK)
    }

    /// The kernel adds 127.0.0.1 and ::1 when `lo` first comes up.
    pub(crate) fn set_loopback_up(&mut self) -> Result<(), KernelError> {
        self.0.set_up(LOOPBACK)
    }

    /// Reads the addresses of `lo`. Linux reports protocols of addresses since 5.18; the address that the kernel
    /// itself gives to `lo` shows whether this kernel does.
    fn read_address(&mut self, routing: &mut Routing) -> Result<(), KernelError> {
        let found = self.0.addresses(Some(Family::V6), |header, attributes| {
            let protocol = attributes.get_proto().ok();
            let is_loopbacks = header.ifa_index == LOOPBACK;
            is_loopbacks.then(|| (protocol, is_passthrough(header, attributes)))
        })?;
        for (protocol, is_passthrough) in found {
            routing.reports_protocols |= protocol.is_some();
            if is_passthrough {
                routing.address = Some(protocol.unwrap_or(0));
            }
        }
        Ok(())
    }

    /// Returns the own addresses of the netns, sorted and without duplicates.
    pub(crate) fn addresses(&mut self) -> Result<Vec<IpAddr>, KernelError> {
        self.addresses_where(|_| true)
    }

    /// Returns the own addresses except those of `lo`, to which every process with a user namespace of its own can add
    /// any address.
    pub(crate) fn addresses_beyond_loopback(&mut self) -> Result<Vec<IpAddr>, KernelError> {
        self.addresses_where(|header| header.ifa_index != LOOPBACK)
    }

    fn addresses_where(
        &mut self,
        is_wanted: impl Fn(&Ifaddrmsg) -> bool,
    ) -> Result<Vec<IpAddr>, KernelError> {
        let addresses = self.0.addresses(None, |header, attributes| {
            // On a point-to-point link, IFA_ADDRESS is the peer's address, and IFA_LOCAL is the own address.
            let own = || attributes.get_local().or_else(|_| attributes.get_address());
            is_wanted(header).then(|| own().ok()).flatten()
        })?;
        let addresses: BTreeSet<_> = addresses.into_iter().collect();
        Ok(addresses.into_iter().collect())
    }

    /// Adds an item, or makes a foreign address inpod's. Sets `lo` up if the item needs it, because runtimes run the
    /// loopback plugin beside inpod's plugin (services/docs/decisions/094-loopback.md). Returns whether the item is new:
    /// an existing item may be foreign, which reading back shows.
    pub(crate) fn add(&mut self, item: &Item) -> Result<bool, KernelError> {
        let act = format!("add the {item}");
        match item {
            Item::Address => {
                self.set_loopback_up()?;
                let request = rt_addr::Request::new().set_create().set_replace();
                self.0.execute(&act, &with_address(request))?;
                Ok(false)
            }
            Item::Route(route) => {
                let result = match self.0.add_route(&act, route) {
                    Err(error) if error.is(nix::Error::ENETDOWN) => {
                        self.set_loopback_up()?;
                        self.0.add_route(&act, route)
                    }
                    result => result,
                };
                is_new(result)
            }
            Item::Rule(rule) => self.0.add_rule(&act, rule),
        }
    }

    /// Waits until the kernel routes to the address, which a worker of the kernel sets up (addrconf_dad_work in
    /// net/ipv6/addrconf.c). Until then no socket can bind to the address.
    pub(crate) fn wait_for_address(&mut self) -> Result<(), KernelError> {
        let deadline = Instant::now() + ADDRESS_TIMEOUT;
        while !(self.is_address_usable()? && self.has_local_route()?) {
            if Instant::now() >= deadline {
                let act = format!("route packets to {PASSTHROUGH_V6}: `lo` has to be up");
                return Err(KernelError::no_answer(&act));
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    fn is_address_usable(&mut self) -> Result<bool, KernelError> {
        let found = self.0.addresses(Some(Family::V6), |header, attributes| {
            let is_usable = header.ifa_index == LOOPBACK
                && header.ifa_flags & TENTATIVE == 0
                && is_passthrough(header, attributes);
            is_usable.then_some(())
        })?;
        Ok(!found.is_empty())
    }

    fn has_local_route(&mut self) -> Result<bool, KernelError> {
        let found = self.0.routes(Family::V6, |SeenRoute { route, .. }| {
            (route.is_local && route.to == Some(PASSTHROUGH_V6.into())).then_some(())
        })?;
        Ok(!found.is_empty())
    }

    pub(crate) fn delete(&mut self, item: &Item) -> Result<(), KernelError> {
        let act = format!("delete the {item}");
        match item {
            Item::Address => {
                let mut request = rt_addr::Request::new().op_deladdr_do(&address_header());
                drop(request.encode().push_local(PASSTHROUGH_V6.into()));
                let result = self.0.execute(&act, &request);
                forgive(result, &[nix::Error::EADDRNOTAVAIL])
            }
            Item::Route(route) => self.0.delete_route(&act, route),
            Item::Rule(rule) => self.0.delete_rule(&act, rule),
        }
    }
}

fn address_header() -> Ifaddrmsg {
    Ifaddrmsg {
        ifa_family: Family::V6.number(),
        ifa_prefixlen: WHOLE,
        ifa_index: LOOPBACK,
        ..Ifaddrmsg::new()
    }
}

fn with_address(request: rt_addr::Request<'_>) -> rt_addr::OpNewaddrDo<'_> {
    let mut request = request.op_newaddr_do(&address_header());
    let attributes = request.encode().push_local(PASSTHROUGH_V6.into());
    drop(attributes.push_proto(PROTOCOL));
    request
}

fn is_passthrough(header: &Ifaddrmsg, attributes: &IterableAddrAttrs<'_>) -> bool {
    let address = attributes.get_address();
    header.ifa_prefixlen == WHOLE && address.is_ok_and(|address| address == PASSTHROUGH_V6)
}
