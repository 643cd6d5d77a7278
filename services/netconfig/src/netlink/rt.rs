//! Reads and writes links, addresses, routes and ip rules over rtnetlink (rtnetlink(7)).

use std::{collections::BTreeSet, net::IpAddr};

use netlink_bindings::{
    rt_addr::{self, Ifaddrmsg, IterableAddrAttrs, OpGetaddrDump},
    rt_link::{self, Ifinfomsg, IterableLinkAttrs, OpGetlinkDo, OpGetlinkDump},
    rt_route::{self, IterableRouteAttrs, OpGetrouteDump, PushRouteAttrs, Rtmsg},
    rt_rule::{
        self, FibRuleAttrs, FibRuleHdr, IterableFibRuleAttrs, OpGetruleDump, PushFibRuleAttrs,
    },
    traits::{NetlinkRequest, Pusher},
};

use super::{KernelError, Socket, retry_on_race};
use crate::{family::Family, marks::Mark};

/// The origin of inpod's routes and ip rules, an unassigned number (rtnetlink(7), "rtm_protocol"; known numbers are
/// in /etc/iproute2/rt_protos). Even after a restart, the origin distinguishes inpod's items from equal foreign
/// items, which inpod must not delete.
pub(crate) const PROTOCOL: u8 = 105;

/// RT_TABLE_MAIN and RT_TABLE_LOCAL of linux/rtnetlink.h.
pub(crate) const MAIN_TABLE: u32 = 254;
pub(crate) const LOCAL_TABLE: u32 = 255;

/// LOOPBACK_IFINDEX, the index of `lo` in every netns.
pub(crate) const LOOPBACK: u32 = 1;

/// RTN_UNICAST and RTN_LOCAL of linux/rtnetlink.h.
pub(crate) const TYPE_UNICAST: u8 = 1;
const TYPE_LOCAL: u8 = 2;

/// RT_SCOPE_UNIVERSE of linux/rtnetlink.h, the only scope of IPv6.
const SCOPE_UNIVERSE: u8 = 0;
/// RT_SCOPE_LINK and RT_SCOPE_HOST of linux/rtnetlink.h.
pub(crate) const SCOPE_LINK: u8 = 253;
const SCOPE_HOST: u8 = 254;

const TO_TABLE: u8 = 1; // FR_ACT_TO_TBL of linux/fib_rules.h
const INVERTED: u32 = 2; // FIB_RULE_INVERT of linux/fib_rules.h
/// The attribute FRA_SUPPRESS_PREFIXLEN of a rule that uses routes of any prefix length.
const NO_LENGTH: u32 = u32::MAX;

/// IFF_UP of linux/if.h.
const UP: u32 = 1;

/// An ip rule that looks up a table. Empty conditions match everything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct IpRule {
    pub(crate) family: Family,
    pub(crate) priority: u32,
    pub(crate) table: u32,
    pub(crate) protocol: u8,
    /// `None` also for a rule in a dump that is inverted.
    pub(crate) mark: Option<Mark>,
    pub(crate) arrives_by: Option<String>,
    pub(crate) to: Option<IpAddr>,
}

/// An ip rule in a dump.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SeenRule {
    /// The table is 0 if the rule looks up no table.
    pub(crate) rule: IpRule,
    /// False if the rule has conditions that [`IpRule`] does not describe, or does not look up a table.
    pub(crate) is_complete: bool,
}

/// A route by an interface, without a gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    pub(crate) family: Family,
    pub(crate) table: u32,
    pub(crate) protocol: u8,
    pub(crate) is_local: bool,
    /// The only destination, or `None` for a default route.
    pub(crate) to: Option<IpAddr>,
    pub(crate) interface: u32,
}

/// A route in a dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SeenRoute {
    /// The interface is 0 if the route has none or several.
    pub(crate) route: Route,
    /// False if the route has properties that [`Route`] does not describe.
    pub(crate) is_complete: bool,
}

impl Socket {
    /// Sets an interface up, and does nothing if the interface is up already.
    pub(crate) fn set_up(&mut self, index: u32) -> Result<(), KernelError> {
        let header = Ifinfomsg {
            ifi_index: i32::try_from(index).unwrap_or(0),
            ifi_flags: UP,
            ifi_change: UP,
            ..Ifinfomsg::new()
        };
        let request = rt_link::Request::new().op_setlink_do(&header);
        self.execute("set an interface up", &request)
    }

    /// Returns the indexes of the bridges.
    pub(crate) fn bridges(&mut self) -> Result<BTreeSet<u32>, KernelError> {
        let header = Ifinfomsg::new();
        let mut request = rt_link::Request::new().op_getlink_dump(&header);
        // The kernel filters by the kind.
        drop(request.encode().nested_linkinfo().push_kind(c"bridge"));
        let payloads = retry_on_race(|| self.dump("read the bridges", &request))?;
        let links = payloads.iter().map(|it| OpGetlinkDump::decode_reply(it));
        let is_bridge = |attributes: &IterableLinkAttrs<'_>| {
            let kind = attributes.get_linkinfo().and_then(|info| info.get_kind());
            kind.is_ok_and(|kind| kind == c"bridge")
        };
        let bridges = links.filter(|(_, attributes)| is_bridge(attributes));
        let indexes = bridges.filter_map(|(header, _)| u32::try_from(header.ifi_index).ok());
        Ok(indexes.collect())
    }

    /// Returns whether an interface is up.
    pub(crate) fn is_up(&mut self, index: u32) -> Result<bool, KernelError> {
        let header = Ifinfomsg {
            ifi_index: i32::try_from(index).unwrap_or(0),
            ..Ifinfomsg::new()
        };
        let request = rt_link::Request::new().op_getlink_do(&header);
        let payload = self.get("read an interface", &request)?;
        let (header, _) = OpGetlinkDo::decode_reply(&payload);
        Ok(header.ifi_flags & UP != 0)
    }

    /// Reads the addresses of a family, or of both, and returns the results of `keep`.
    pub(crate) fn addresses<T>(
        &mut self,
        family: Option<Family>,
        keep: impl Fn(&Ifaddrmsg, &IterableAddrAttrs<'_>) -> Option<T>,
    ) -> Result<Vec<T>, KernelError> {
        let header = Ifaddrmsg {
            ifa_family: family.map_or(0, Family::number),
            ..Ifaddrmsg::new()
        };
        let request = rt_addr::Request::new().op_getaddr_dump(&header);
        self.dump_family("read the addresses", &request, |payload| {
            let (header, attributes) = OpGetaddrDump::decode_reply(payload);
            keep(&header, &attributes)
        })
    }

    /// Reads the routes of a family, and returns the results of `keep`.
    pub(crate) fn routes<T>(
        &mut self,
        family: Family,
        keep: impl Fn(SeenRoute) -> Option<T>,
    ) -> Result<Vec<T>, KernelError> {
        let header = Rtmsg {
            rtm_family: family.number(),
            ..Rtmsg::new()
        };
        let request = rt_route::Request::new().op_getroute_dump(&header);
        self.dump_family(&format!("read the {family} routes"), &request, |payload| {
            let (header, attributes) = OpGetrouteDump::decode_reply(payload);
            keep(seen_route(family, &header, &attributes))
        })
    }

    /// Reads the ip rules of a family, at most `max`, in the order of evaluation. Returns the results of `keep`.
    pub(crate) fn rules<T>(
        &mut self,
        family: Family,
        max: usize,
        keep: impl Fn(SeenRule) -> Option<T>,
    ) -> Result<Vec<T>, KernelError> {
        let header = FibRuleHdr {
            family: family.number(),
            ..FibRuleHdr::new()
        };
        let act = format!("read the {family} ip rules");
        let request = rt_rule::Request::new().op_getrule_dump(&header);
        unless_without_ipv6(retry_on_race(|| {
            self.dump_at_most(&act, &request, max, |payload| {
                let (header, attributes) = OpGetruleDump::decode_reply(payload);
                keep(seen_rule(family, &header, attributes))
            })
        }))
    }

    /// Adds a route. Fails with EEXIST if the table has a route to the same destination.
    pub(crate) fn add_route(&mut self, act: &str, route: &Route) -> Result<(), KernelError> {
        let request = rt_route::Request::new().set_create().set_excl();
        let mut request = request.op_newroute_do(&route_header(route));
        push_route(route, request.encode());
        self.change(act, &request)
    }

    pub(crate) fn delete_route(&mut self, act: &str, route: &Route) -> Result<(), KernelError> {
        let mut request = rt_route::Request::new().op_delroute_do(&route_header(route));
        push_route(route, request.encode());
        forgive(self.change(act, &request), &[nix::Error::ESRCH])
    }

    /// Adds an ip rule after the rules of the same priority, unless an equal one exists. Returns whether the rule is new.
    pub(crate) fn add_rule(&mut self, act: &str, rule: &IpRule) -> Result<bool, KernelError> {
        let request = rt_rule::Request::new().set_create().set_excl();
        let mut request = request.op_newrule_do(&rule_header(rule));
        push_rule(rule, request.encode());
        is_new(self.change(act, &request))
    }

    pub(crate) fn delete_rule(&mut self, act: &str, rule: &IpRule) -> Result<(), KernelError> {
        let mut request = rt_rule::Request::new().op_delrule_do(&rule_header(rule));
        push_rule(rule, request.encode());
        forgive(self.change(act, &request), &[nix::Error::ENOENT])
    }

    /// Dumps addresses or routes, and repeats dumps that changed meanwhile. Returns an empty list for IPv6 on
    /// kernels without IPv6.
    fn dump_family<R: NetlinkRequest, T>(
        &mut self,
        act: &str,
        request: &R,
        keep: impl Fn(&[u8]) -> Option<T>,
    ) -> Result<Vec<T>, KernelError> {
        unless_without_ipv6(retry_on_race(|| self.dump_some(act, request, &keep)))
    }
}

fn unless_without_ipv6<T>(result: Result<Vec<T>, KernelError>) -> Result<Vec<T>, KernelError> {
    match result {
        Err(error) if error.is(nix::Error::EAFNOSUPPORT) => Ok(Vec::new()),
        result => result,
    }
}

/// Returns `false` for the refusal of an item that exists.
pub(crate) fn is_new(added: Result<(), KernelError>) -> Result<bool, KernelError> {
    match added {
        Err(error) if error.is(nix::Error::EEXIST) => Ok(false),
        added => added.map(|()| true),
    }
}

pub(crate) fn forgive(
    result: Result<(), KernelError>,
    errnos: &[nix::Error],
) -> Result<(), KernelError> {
    match result {
        Err(error) if errnos.iter().any(|errno| error.is(*errno)) => Ok(()),
        result => result,
    }
}

/// Returns the prefix length of an optional single address.
fn length(family: Family, address: Option<IpAddr>) -> u8 {
    let whole = match family {
        Family::V4 => 32,
        Family::V6 => 128,
    };
    address.map_or(0, |_| whole)
}

fn route_header(route: &Route) -> Rtmsg {
    let family = route.family;
    let (kind, scope) = match (route.is_local, family) {
        (true, Family::V4) => (TYPE_LOCAL, SCOPE_HOST),
        (true, Family::V6) => (TYPE_LOCAL, SCOPE_UNIVERSE),
        (false, Family::V4) => (TYPE_UNICAST, SCOPE_LINK),
        (false, Family::V6) => (TYPE_UNICAST, SCOPE_UNIVERSE),
    };
    Rtmsg {
        rtm_family: family.number(),
        rtm_dst_len: length(family, route.to),
        rtm_protocol: route.protocol,
        rtm_scope: scope,
        rtm_type: kind,
        ..Rtmsg::new()
    }
}

fn push_route<P: Pusher>(route: &Route, attributes: PushRouteAttrs<P>) {
    let mut attributes = attributes.push_table(route.table).push_oif(route.interface);
    if let Some(address) = route.to {
        attributes = attributes.push_dst(address);
    }
    drop(attributes);
}

fn seen_route(family: Family, header: &Rtmsg, attributes: &IterableRouteAttrs<'_>) -> SeenRoute {
    let to: Option<IpAddr> = attributes.get_dst().ok();
    let interface = attributes.get_oif().unwrap_or(0);
    let is_complete = matches!(header.rtm_type, TYPE_UNICAST | TYPE_LOCAL)
        && (header.rtm_src_len, header.rtm_tos) == (0, 0)
        && header.rtm_dst_len == length(family, to)
        && interface != 0
        && attributes.get_gateway().is_err();
    let table = attributes.get_table();
    let route = Route {
        family,
        table: table.unwrap_or_else(|_| header.rtm_table.into()),
        protocol: header.rtm_protocol,
        is_local: header.rtm_type == TYPE_LOCAL,
        to,
        interface,
    };
    SeenRoute { route, is_complete }
}

fn rule_header(rule: &IpRule) -> FibRuleHdr {
    FibRuleHdr {
        family: rule.family.number(),
        dst_len: length(rule.family, rule.to),
        action: TO_TABLE,
        ..FibRuleHdr::new()
    }
}

fn push_rule<P: Pusher>(rule: &IpRule, attributes: PushFibRuleAttrs<P>) {
    let attributes = attributes.push_priority(rule.priority);
    let attributes = attributes.push_table(rule.table);
    let mut attributes = attributes.push_protocol(rule.protocol);
    if let Some(mark) = rule.mark {
        let marked = attributes.push_fwmark(mark.value());
        attributes = marked.push_fwmask(mark.mask());
    }
    if let Some(address) = rule.to {
        attributes = attributes.push_dst(address);
    }
    if let Some(name) = &rule.arrives_by {
        attributes = attributes.push_iifname_bytes(name.as_bytes());
    }
    drop(attributes);
}

fn seen_rule(
    family: Family,
    header: &FibRuleHdr,
    attributes: IterableFibRuleAttrs<'_>,
) -> SeenRule {
    let to: Option<IpAddr> = attributes.get_dst().ok();
    let name = attributes.get_iifname().ok();
    let is_inverted = header.flags & INVERTED != 0;
    // The kernel omits a mark of 0, and compares only the bits of the mask.
    let mask = attributes.get_fwmask().ok().filter(|_| !is_inverted);
    let mark = mask.and_then(|mask| Mark::new(attributes.get_fwmark().unwrap_or(0) & mask, mask));
    let looks_up = header.action == TO_TABLE;
    let table = attributes.get_table();
    let rule = IpRule {
        family,
        // The kernel omits the priority 0.
        priority: attributes.get_priority().unwrap_or(0),
        table: if looks_up {
            table.unwrap_or_else(|_| header.table.into())
        } else {
            0
        },
        protocol: attributes.get_protocol().unwrap_or(0),
        mark,
        arrives_by: name.map(|name| name.to_string_lossy().into_owned()),
        to,
    };
    let is_plain = looks_up
        && (header.src_len, header.tos) == (0, 0)
        && header.dst_len == length(family, to)
        && !is_inverted;
    let mut attributes = attributes.into_iter().flatten();
    SeenRule {
        rule,
        is_complete: is_plain && !attributes.any(|attribute| is_other_condition(&attribute)),
    }
}

/// Returns whether the attribute restricts an ip rule by anything but destination, mark and inbound interface.
fn is_other_condition(attribute: &FibRuleAttrs<'_>) -> bool {
    if let FibRuleAttrs::SuppressPrefixlen(length) = attribute {
        return *length != NO_LENGTH;
    }
    matches!(
        attribute,
        FibRuleAttrs::Src(_)
            | FibRuleAttrs::SuppressIfgroup(_)
            | FibRuleAttrs::Dscp(_)
            | FibRuleAttrs::Flowlabel(_)
            | FibRuleAttrs::Oifname(_)
            | FibRuleAttrs::UidRange(_)
            | FibRuleAttrs::IpProto(_)
            | FibRuleAttrs::SportRange(_)
            | FibRuleAttrs::DportRange(_)
            | FibRuleAttrs::TunId(_)
            | FibRuleAttrs::L3mdev(_)
    )
}
