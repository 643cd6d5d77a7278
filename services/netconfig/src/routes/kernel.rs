//! Reads and writes routes, ip rules and addresses over rtnetlink.

use std::{
    collections::BTreeSet,
    io,
    net::IpAddr,
    thread,
    time::{Duration, Instant},
};

use inpod_types::NetnsId;
use netlink_bindings::{
    rt_addr::{self, Ifaddrmsg, IterableAddrAttrs, OpGetaddrDump},
    rt_route::{self, IterableRouteAttrs, Rtmsg},
    rt_rule::{self, FibRuleHdr, IterableFibRuleAttrs, PushFibRuleAttrs},
    traits::{NetlinkRequest as _, Pusher},
};
use nix::sys::socket::SockProtocol;

use super::{Item, Part, Recipient, Routing};
use crate::{
    family::Family,
    marks::{FROM_PROXY, FROM_ZTUNNEL, Mark, PROXY_TABLE, RULE_PRIORITY, TO_ZTUNNEL},
    netlink::{
        KernelError, Socket,
        route::{PROTOCOL, SCOPE_HOST, SCOPE_UNIVERSE, TO_TABLE, TYPE_LOCAL, narrows},
    },
    rules::sidecar::PASSTHROUGH_V6,
};

/// LOOPBACK_IFINDEX, the index of `lo` in every netns.
const LOOPBACK: u32 = 1;

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

/// The priority of the main table's ip rule (fib_default_rules_init in net/ipv4/fib_rules.c).
const MAIN_PRIORITY: u32 = 0x7ffe;

/// The mark in ip rules of Istio's sidecar installer, which compare the whole mark.
const SIDECAR_MARK: Mark = FROM_PROXY.whole();

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
            self.read_routes(family, &mut routing)?;
            self.read_rules(family, &mut routing)?;
        }
        self.read_addresses(&mut routing)?;
        Ok(routing)
    }

    pub(crate) fn is_loopback_up(&mut self) -> Result<bool, KernelError> {
        self.0.is_up(LOOPBACK)
    }

    /// The kernel adds 127.0.0.1 and ::1 when `lo` first comes up.
    pub(crate) fn set_loopback_up(&mut self) -> Result<(), KernelError> {
        self.0.set_up(LOOPBACK)
    }

    fn read_routes(&mut self, family: Family, routing: &mut Routing) -> Result<(), KernelError> {
        let act = format!("read the {family} routes");
        let found = self.0.routes(&act, family, |header, attributes| {
            let mut recipients = Recipient::ALL.into_iter();
            let recipient =
                recipients.find(|recipient| is_route(*recipient, family, header, attributes))?;
            Some((recipient, header.rtm_protocol))
        })?;
        for (recipient, protocol) in found {
            routing.record((family, Part::Route(recipient)), protocol);
        }
        Ok(())
    }

    fn read_rules(&mut self, family: Family, routing: &mut Routing) -> Result<(), KernelError> {
        let act = format!("read the {family} ip rules");
        let found = self
            .0
            .rules(&act, family, MAX_RULES, |header, attributes| {
                let mut recipients = Recipient::ALL.into_iter();
                let ours = recipients.find(|recipient| is_rule(*recipient, header, attributes));
                if let Some(recipient) = ours {
                    let protocol = attributes.get_protocol().unwrap_or(0);
                    return Some(SeenRule::Ours(recipient, protocol));
                }
                let incumbents = incumbents_priority(header, attributes);
                let incumbents = incumbents.map(SeenRule::Incumbents);
                incumbents.or_else(|| rule_before_main(attributes).map(SeenRule::BeforeMain))
            })?;
        for rule in found {
            match rule {
                SeenRule::Ours(recipient, protocol) => {
                    routing.record((family, Part::Rule(recipient)), protocol);
                }
                SeenRule::Incumbents(priority) => {
                    routing
                        .incumbents
                        .push((family, Part::IncumbentRule(priority)));
                }
                SeenRule::BeforeMain((priority, mark)) => {
                    routing.foreign_rules.push((family, priority, mark));
                }
            }
        }
        Ok(())
    }

    /// Reads the addresses of `lo`. Linux reports protocols of addresses since 5.18; the address that the kernel
    /// itself gives to `lo` shows whether this kernel does.
    fn read_addresses(&mut self, routing: &mut Routing) -> Result<(), KernelError> {
        let found = self.ipv6_addresses(|header, attributes| {
            let protocol = attributes.get_proto().ok();
            let is_loopbacks = header.ifa_index == LOOPBACK;
            is_loopbacks.then(|| (protocol, is_passthrough(header, attributes)))
        })?;
        for (protocol, is_passthrough) in found {
            routing.reports_protocols |= protocol.is_some();
            if is_passthrough {
                routing.record((Family::V6, Part::Address), protocol.unwrap_or(0));
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
        let request = rt_addr::Request::new().op_getaddr_dump(&Ifaddrmsg::new());
        let addresses = self
            .0
            .dump_family("read the addresses", &request, |payload| {
                let (header, attributes) = OpGetaddrDump::decode_reply(payload);
                if !is_wanted(&header) {
                    return None;
                }
                // On a point-to-point link, IFA_ADDRESS is the peer's address, and IFA_LOCAL is the own address.
                attributes
                    .get_local()
                    .or_else(|_| attributes.get_address())
                    .ok()
            })?;
        let addresses: BTreeSet<_> = addresses.into_iter().collect();
        Ok(addresses.into_iter().collect())
    }

    fn ipv6_addresses<T>(
        &mut self,
        keep: impl Fn(&Ifaddrmsg, &IterableAddrAttrs<'_>) -> Option<T>,
    ) -> Result<Vec<T>, KernelError> {
        let header = Ifaddrmsg {
            ifa_family: Family::V6.number(),
            ..Ifaddrmsg::new()
        };
        let request = rt_addr::Request::new().op_getaddr_dump(&header);
        self.0
            .dump_family("read the addresses", &request, |payload| {
                let (header, attributes) = OpGetaddrDump::decode_reply(payload);
                keep(&header, &attributes)
            })
    }

    /// Adds an item. Sets `lo` up if the item needs it, because runtimes run the loopback plugin beside inpod's
    /// plugin (services/docs/decisions/094-loopback.md).
    pub(crate) fn add(&mut self, item: Item) -> Result<(), KernelError> {
        let (family, part) = item;
        let act = format!("add the {family} {part}");
        let result = match part {
            Part::Address => {
                self.set_loopback_up()?;
                let request = rt_addr::Request::new().set_create().set_excl();
                self.0.execute(&act, &with_address(request))
            }
            Part::Route(recipient) => {
                let request = rt_route::Request::new().set_create().set_excl();
                let mut request = request.op_newroute_do(&route_header(recipient, family));
                drop(request.encode().push_oif(LOOPBACK));
                match self.0.change(&act, &request) {
                    Err(error) if error.is(nix::Error::ENETDOWN) => {
                        self.set_loopback_up()?;
                        self.0.change(&act, &request)
                    }
                    result => result,
                }
            }
            Part::Rule(recipient) => {
                let request = rt_rule::Request::new().set_create().set_excl();
                let mut request = request.op_newrule_do(&rule_header(recipient.table(), family));
                push_rule(recipient, request.encode());
                self.0.change(&act, &request)
            }
            // inpod never adds rules of Istio's sidecar installer.
            Part::IncumbentRule(_) => Ok(()),
        };
        forgive(result, &[nix::Error::EEXIST])
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
        let found = self.ipv6_addresses(|header, attributes| {
            let is_usable = header.ifa_index == LOOPBACK
                && header.ifa_flags & TENTATIVE == 0
                && is_passthrough(header, attributes);
            is_usable.then_some(())
        })?;
        Ok(!found.is_empty())
    }

    fn has_local_route(&mut self) -> Result<bool, KernelError> {
        let act = "read the IPv6 routes";
        let found = self.0.routes(act, Family::V6, |header, attributes| {
            let is_local = (header.rtm_type, header.rtm_dst_len) == (TYPE_LOCAL, WHOLE);
            let to = attributes.get_dst();
            (is_local && to.is_ok_and(|to| to == PASSTHROUGH_V6)).then_some(())
        })?;
        Ok(!found.is_empty())
    }

    /// Turns a foreign item into inpod's, without interruption.
    pub(crate) fn adopt(&mut self, item: Item) -> Result<(), KernelError> {
        let (family, part) = item;
        let act = format!("take over the {family} {part}");
        match part {
            Part::Address => {
                let request = rt_addr::Request::new().set_create().set_replace();
                self.0.execute(&act, &with_address(request))
            }
            Part::Route(recipient) => {
                let request = rt_route::Request::new().set_create().set_replace();
                let mut request = request.op_newroute_do(&route_header(recipient, family));
                drop(request.encode().push_oif(LOOPBACK));
                self.0.change(&act, &request)
            }
            // Rules that differ only in protocol can coexist; the kernel finds the older rule first.
            Part::Rule(recipient) => {
                self.add(item)?;
                self.delete_first(recipient, family)
            }
            Part::IncumbentRule(_) => Ok(()),
        }
    }

    fn delete_first(&mut self, recipient: Recipient, family: Family) -> Result<(), KernelError> {
        let header = rule_header(recipient.table(), family);
        let mut request = rt_rule::Request::new().op_delrule_do(&header);
        drop(push_selector(recipient, request.encode()));
        let act = format!("delete the {family} ip rule that was taken over");
        forgive(self.0.change(&act, &request), &[nix::Error::ENOENT])
    }

    pub(crate) fn delete(&mut self, item: Item) -> Result<(), KernelError> {
        let (family, part) = item;
        let act = format!("delete the {family} {part}");
        let result = match part {
            Part::Address => {
                let mut request = rt_addr::Request::new().op_deladdr_do(&address_header());
                drop(request.encode().push_local(PASSTHROUGH_V6.into()));
                self.0.execute(&act, &request)
            }
            Part::Route(recipient) => {
                let header = route_header(recipient, family);
                let mut request = rt_route::Request::new().op_delroute_do(&header);
                drop(request.encode().push_oif(LOOPBACK));
                self.0.change(&act, &request)
            }
            Part::Rule(recipient) => {
                let header = rule_header(recipient.table(), family);
                let mut request = rt_rule::Request::new().op_delrule_do(&header);
                push_rule(recipient, request.encode());
                self.0.change(&act, &request)
            }
            Part::IncumbentRule(priority) => {
                let header = rule_header(PROXY_TABLE, family);
                let mut request = rt_rule::Request::new().op_delrule_do(&header);
                drop(push_mark(priority, SIDECAR_MARK, request.encode()));
                self.0.change(&act, &request)
            }
        };
        let gone = [
            nix::Error::ENOENT,
            nix::Error::ESRCH,
            nix::Error::EADDRNOTAVAIL,
        ];
        forgive(result, &gone)
    }
}

fn scope(family: Family) -> u8 {
    match family {
        Family::V4 => SCOPE_HOST,
        Family::V6 => SCOPE_UNIVERSE,
    }
}

fn forgive(result: Result<(), KernelError>, errnos: &[nix::Error]) -> Result<(), KernelError> {
    match result {
        Err(error) if errnos.iter().any(|errno| error.is(*errno)) => Ok(()),
        result => result,
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

fn route_header(recipient: Recipient, family: Family) -> Rtmsg {
    Rtmsg {
        rtm_family: family.number(),
        rtm_table: recipient.table(),
        rtm_protocol: PROTOCOL,
        rtm_scope: scope(family),
        rtm_type: TYPE_LOCAL,
        ..Rtmsg::new()
    }
}

fn rule_header(table: u8, family: Family) -> FibRuleHdr {
    FibRuleHdr {
        family: family.number(),
        table,
        action: TO_TABLE,
        ..FibRuleHdr::new()
    }
}

fn push_rule<P: Pusher>(recipient: Recipient, attributes: PushFibRuleAttrs<P>) {
    drop(push_selector(recipient, attributes).push_protocol(PROTOCOL));
}

fn push_selector<P: Pusher>(
    recipient: Recipient,
    attributes: PushFibRuleAttrs<P>,
) -> PushFibRuleAttrs<P> {
    push_mark(RULE_PRIORITY, recipient.mark(), attributes)
}

fn push_mark<P: Pusher>(
    priority: u32,
    mark: Mark,
    attributes: PushFibRuleAttrs<P>,
) -> PushFibRuleAttrs<P> {
    let attributes = attributes.push_priority(priority);
    attributes
        .push_fwmark(mark.value())
        .push_fwmask(mark.mask())
}

/// Returns whether a route is a local default route to `lo` without any restriction.
fn is_route(
    recipient: Recipient,
    family: Family,
    header: &Rtmsg,
    attributes: &IterableRouteAttrs<'_>,
) -> bool {
    header.rtm_family == family.number()
        && attributes.get_table().ok() == Some(recipient.table().into())
        && (header.rtm_dst_len, header.rtm_src_len, header.rtm_tos) == (0, 0, 0)
        && header.rtm_type == TYPE_LOCAL
        && attributes.get_oif().ok() == Some(LOOPBACK)
        && attributes.get_gateway().is_err()
}

/// An ip rule relevant to the redirection.
enum SeenRule {
    /// A rule like inpod's, and the protocol.
    Ours(Recipient, u8),
    /// A rule of Istio's sidecar installer, and the priority.
    Incumbents(u32),
    BeforeMain((u32, Mark)),
}

fn is_rule(
    recipient: Recipient,
    header: &FibRuleHdr,
    attributes: IterableFibRuleAttrs<'_>,
) -> bool {
    attributes.get_priority().ok() == Some(RULE_PRIORITY)
        && selects_by_mark(recipient.table(), recipient.mark(), header, attributes)
}

/// Returns the priority, chosen by the kernel, of an ip rule of Istio's sidecar installer.
fn incumbents_priority(header: &FibRuleHdr, attributes: IterableFibRuleAttrs<'_>) -> Option<u32> {
    let is_theirs = selects_by_mark(PROXY_TABLE, SIDECAR_MARK, header, attributes);
    is_theirs.then(|| attributes.get_priority().unwrap_or(0))
}

/// Returns priority and mark of an ip rule that can route packets of ztunnel, or to ztunnel, by another table.
fn rule_before_main(attributes: IterableFibRuleAttrs<'_>) -> Option<(u32, Mark)> {
    let priority = attributes.get_priority().unwrap_or(0);
    let mark = Mark::new(attributes.get_fwmark().ok()?, attributes.get_fwmask().ok()?)?;
    let mut ours = [FROM_ZTUNNEL, TO_ZTUNNEL].into_iter();
    let matches = ours.any(|ours| ours.matches(mark));
    (priority < MAIN_PRIORITY && matches).then_some((priority, mark))
}

/// Returns whether the ip rule sends exactly the packets with `mark` to the table.
fn selects_by_mark(
    table: u8,
    mark: Mark,
    header: &FibRuleHdr,
    attributes: IterableFibRuleAttrs<'_>,
) -> bool {
    header.action == TO_TABLE
        && attributes.get_table().ok() == Some(table.into())
        && attributes.get_fwmark().ok() == Some(mark.value())
        && attributes.get_fwmask().ok() == Some(mark.mask())
        && (header.dst_len, header.src_len, header.tos, header.flags) == (0, 0, 0, 0)
        && attributes.get_iifname().is_err()
        && !attributes.flatten().any(|attribute| narrows(&attribute))
}
