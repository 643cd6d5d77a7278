//! Routes and ip rules in messages.

use std::io;

use netlink_bindings::{
    rt_route::{self, IterableRouteAttrs, OpGetrouteDump, Rtmsg},
    rt_rule::{
        self, FibRuleAttrs, FibRuleHdr, IterableFibRuleAttrs, OpGetruleDump, PushFibRuleAttrs,
    },
    traits::{NetlinkRequest, Pusher},
};
use nix::sys::socket::SockProtocol;

use super::{Item, Part, Routing};
use crate::{
    family::Family,
    marks::{RULE_PRIORITY, TABLE, TO_ZTUNNEL},
    netlink::{
        KernelError, Socket,
        route::{PROTOCOL, SCOPE_HOST, SCOPE_UNIVERSE, TO_TABLE, TYPE_LOCAL},
    },
};

/// Of `lo`, in every netns (LOOPBACK_IFINDEX).
const LOOPBACK: u32 = 1;

/// The kernel's routes and ip rules in one netns.
#[derive(Debug)]
pub(crate) struct Routes(Socket);

impl Routes {
    /// Opens a socket in the calling thread's netns; it can be used from any other.
    pub(crate) fn open() -> io::Result<Self> {
        Socket::open(SockProtocol::NetlinkRoute).map(Self)
    }

    /// What is there of ours, or equal to ours.
    pub(crate) fn read(&mut self) -> Result<Routing, KernelError> {
        let mut routing = Routing::default();
        for family in Family::ALL {
            self.read_routes(family, &mut routing)?;
            self.read_rules(family, &mut routing)?;
        }
        Ok(routing)
    }

    fn read_routes(&mut self, family: Family, routing: &mut Routing) -> Result<(), KernelError> {
        let header = Rtmsg {
            rtm_family: family.number(),
            ..Rtmsg::new()
        };
        let request = rt_route::Request::new().op_getroute_dump(&header);
        for payload in self
            .0
            .dump_family(&format!("read the {family} routes"), &request)?
        {
            let (header, attributes) = OpGetrouteDump::decode_reply(&payload);
            if is_our_route(family, &header, &attributes) {
                routing.note((family, Part::Route), header.rtm_protocol);
            }
        }
        Ok(())
    }

    fn read_rules(&mut self, family: Family, routing: &mut Routing) -> Result<(), KernelError> {
        let header = FibRuleHdr {
            family: family.number(),
            ..FibRuleHdr::new()
        };
        let request = rt_rule::Request::new().op_getrule_dump(&header);
        for payload in self
            .0
            .dump_family(&format!("read the {family} ip rules"), &request)?
        {
            let (header, attributes) = OpGetruleDump::decode_reply(&payload);
            if is_our_rule(&header, attributes) {
                let protocol = attributes.get_protocol().unwrap_or(0);
                routing.note((family, Part::Rule), protocol);
            }
        }
        Ok(())
    }

    /// Adds one; one that is there already is not touched.
    pub(crate) fn add(&mut self, item: Item) -> Result<(), KernelError> {
        let (family, part) = item;
        let act = format!("add the {family} {part}");
        let result = match part {
            Part::Route => {
                let request = rt_route::Request::new().set_create().set_excl();
                let mut request = request.op_newroute_do(&route_header(family));
                drop(request.encode().push_oif(LOOPBACK));
                self.0.act(&act, &request)
            }
            Part::Rule => {
                let request = rt_rule::Request::new().set_create().set_excl();
                let mut request = request.op_newrule_do(&rule_header(family));
                describe_rule(request.encode());
                self.0.act(&act, &request)
            }
        };
        forgive(result, &[nix::Error::EEXIST])
    }

    /// Makes one that another made ours. There is no moment without it.
    pub(crate) fn adopt(&mut self, item: Item) -> Result<(), KernelError> {
        let (family, part) = item;
        match part {
            Part::Route => {
                let request = rt_route::Request::new().set_create().set_replace();
                let mut request = request.op_newroute_do(&route_header(family));
                drop(request.encode().push_oif(LOOPBACK));
                self.0
                    .act(&format!("take over the {family} {part}"), &request)
            }
            // Two that differ in who made them stand beside each other, and the older one is found first.
            Part::Rule => {
                self.add(item)?;
                self.delete_first(family)
            }
        }
    }

    fn delete_first(&mut self, family: Family) -> Result<(), KernelError> {
        let mut request = rt_rule::Request::new().op_delrule_do(&rule_header(family));
        drop(match_rule(request.encode()));
        let act = format!("delete the {family} ip rule that was taken over");
        forgive(self.0.act(&act, &request), &[nix::Error::ENOENT])
    }

    /// Deletes ours; one that is gone already is fine.
    pub(crate) fn delete(&mut self, item: Item) -> Result<(), KernelError> {
        let (family, part) = item;
        let act = format!("delete the {family} {part}");
        let result = match part {
            Part::Route => {
                let mut request = rt_route::Request::new().op_delroute_do(&route_header(family));
                drop(request.encode().push_oif(LOOPBACK));
                self.0.act(&act, &request)
            }
            Part::Rule => {
                let mut request = rt_rule::Request::new().op_delrule_do(&rule_header(family));
                describe_rule(request.encode());
                self.0.act(&act, &request)
            }
        };
        forgive(result, &[nix::Error::ENOENT, nix::Error::ESRCH])
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

fn route_header(family: Family) -> Rtmsg {
    Rtmsg {
        rtm_family: family.number(),
        rtm_table: TABLE,
        rtm_protocol: PROTOCOL,
        rtm_scope: scope(family),
        rtm_type: TYPE_LOCAL,
        ..Rtmsg::new()
    }
}

fn rule_header(family: Family) -> FibRuleHdr {
    FibRuleHdr {
        family: family.number(),
        table: TABLE,
        action: TO_TABLE,
        ..FibRuleHdr::new()
    }
}

fn describe_rule<P: Pusher>(attributes: PushFibRuleAttrs<P>) {
    drop(match_rule(attributes).push_protocol(PROTOCOL));
}

fn match_rule<P: Pusher>(attributes: PushFibRuleAttrs<P>) -> PushFibRuleAttrs<P> {
    let attributes = attributes.push_priority(RULE_PRIORITY);
    let attributes = attributes.push_fwmark(TO_ZTUNNEL.value());
    attributes.push_fwmask(TO_ZTUNNEL.mask())
}

/// Everything goes to `lo` as local: no destination, and nothing that sends it elsewhere.
fn is_our_route(family: Family, header: &Rtmsg, attributes: &IterableRouteAttrs<'_>) -> bool {
    header.rtm_family == family.number()
        && attributes
            .get_table()
            .is_ok_and(|table| table == u32::from(TABLE))
        && (header.rtm_dst_len, header.rtm_src_len, header.rtm_tos) == (0, 0, 0)
        && header.rtm_type == TYPE_LOCAL
        && attributes.get_oif().is_ok_and(|oif| oif == LOOPBACK)
        && attributes.get_gateway().is_err()
}

fn is_our_rule(header: &FibRuleHdr, attributes: IterableFibRuleAttrs<'_>) -> bool {
    header.action == TO_TABLE
        && attributes
            .get_table()
            .is_ok_and(|table| table == u32::from(TABLE))
        && attributes
            .get_priority()
            .is_ok_and(|priority| priority == RULE_PRIORITY)
        && attributes
            .get_fwmark()
            .is_ok_and(|mark| mark == TO_ZTUNNEL.value())
        && attributes
            .get_fwmask()
            .is_ok_and(|mask| mask == TO_ZTUNNEL.mask())
        && (header.dst_len, header.src_len, header.tos, header.flags) == (0, 0, 0, 0)
        && attributes.flatten().all(|attribute| !narrows(&attribute))
}

/// Whether an attribute makes a rule match less than the mark does.
fn narrows(attribute: &FibRuleAttrs<'_>) -> bool {
    matches!(
        attribute,
        FibRuleAttrs::Iifname(_)
            | FibRuleAttrs::Oifname(_)
            | FibRuleAttrs::UidRange(_)
            | FibRuleAttrs::IpProto(_)
            | FibRuleAttrs::SportRange(_)
            | FibRuleAttrs::DportRange(_)
            | FibRuleAttrs::TunId(_)
            | FibRuleAttrs::L3mdev(_)
    )
}
