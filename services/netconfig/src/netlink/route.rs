//! Defines the numbers of routes and ip rules (rtnetlink(7)), and dumps both.

use std::collections::BTreeSet;

use netlink_bindings::{
    rt_link::{self, Ifinfomsg, IterableLinkAttrs, OpGetlinkDo, OpGetlinkDump},
    rt_route::{self, IterableRouteAttrs, OpGetrouteDump, Rtmsg},
    rt_rule::{self, FibRuleAttrs, FibRuleHdr, IterableFibRuleAttrs, OpGetruleDump},
    traits::NetlinkRequest,
};

use super::{KernelError, Socket, retry_on_race};
use crate::family::Family;

/// The origin of inpod's routes and ip rules, an unassigned number (rtnetlink(7), "rtm_protocol"; known numbers are
/// in /etc/iproute2/rt_protos). Even after a restart, the origin distinguishes inpod's items from equal foreign
/// items, which inpod must not delete.
pub(crate) const PROTOCOL: u8 = 105;

/// RTN_UNICAST and RTN_LOCAL of linux/rtnetlink.h.
pub(crate) const TYPE_UNICAST: u8 = 1;
pub(crate) const TYPE_LOCAL: u8 = 2;

/// RT_SCOPE_UNIVERSE of linux/rtnetlink.h, the only scope of IPv6.
pub(crate) const SCOPE_UNIVERSE: u8 = 0;
/// RT_SCOPE_LINK and RT_SCOPE_HOST of linux/rtnetlink.h.
pub(crate) const SCOPE_LINK: u8 = 253;
pub(crate) const SCOPE_HOST: u8 = 254;

pub(crate) const TO_TABLE: u8 = 1; // FR_ACT_TO_TBL of linux/fib_rules.h

/// IFF_UP of linux/if.h.
const UP: u32 = 1;

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

    /// Reads the routes of a family, and returns the results of `keep`.
    pub(crate) fn routes<T>(
        &mut self,
        act: &str,
        family: Family,
        keep: impl Fn(&Rtmsg, &IterableRouteAttrs<'_>) -> Option<T>,
    ) -> Result<Vec<T>, KernelError> {
        let header = Rtmsg {
            rtm_family: family.number(),
            ..Rtmsg::new()
        };
        let request = rt_route::Request::new().op_getroute_dump(&header);
        self.dump_family(act, &request, |payload| {
            let (header, attributes) = OpGetrouteDump::decode_reply(payload);
            keep(&header, &attributes)
        })
    }

    /// Reads the ip rules of a family, at most `max`, and returns the results of `keep`.
    pub(crate) fn rules<T>(
        &mut self,
        act: &str,
        family: Family,
        max: usize,
        keep: impl Fn(&FibRuleHdr, IterableFibRuleAttrs<'_>) -> Option<T>,
    ) -> Result<Vec<T>, KernelError> {
        let header = FibRuleHdr {
            family: family.number(),
            ..FibRuleHdr::new()
        };
        let request = rt_rule::Request::new().op_getrule_dump(&header);
        unless_without_ipv6(retry_on_race(|| {
            self.dump_at_most(act, &request, max, |payload| {
                let (header, attributes) = OpGetruleDump::decode_reply(payload);
                keep(&header, attributes)
            })
        }))
    }

    /// Dumps addresses or routes, and repeats dumps that changed meanwhile. Returns an empty list for IPv6 on
    /// kernels without IPv6.
    pub(crate) fn dump_family<R: NetlinkRequest, T>(
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

/// Returns whether the attribute restricts an ip rule by anything but addresses, mark and inbound interface.
pub(crate) fn narrows(attribute: &FibRuleAttrs<'_>) -> bool {
    matches!(
        attribute,
        FibRuleAttrs::Oifname(_)
            | FibRuleAttrs::UidRange(_)
            | FibRuleAttrs::IpProto(_)
            | FibRuleAttrs::SportRange(_)
            | FibRuleAttrs::DportRange(_)
            | FibRuleAttrs::TunId(_)
            | FibRuleAttrs::L3mdev(_)
    )
}
