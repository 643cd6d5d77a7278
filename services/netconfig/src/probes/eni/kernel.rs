use std::{io, net::IpAddr};

use netlink_bindings::{
    rt_rule::{self, FibRuleAttrs, FibRuleHdr, IterableFibRuleAttrs, PushFibRuleAttrs},
    traits::Pusher,
};
use nix::{net::if_::if_indextoname, sys::socket::SockProtocol};

use super::{Route, Rule};
use crate::{
    family::Family,
    netlink::{
        KernelError, Socket,
        route::{TO_TABLE, TYPE_UNICAST, narrows},
    },
};

#[derive(Debug)]
pub(super) struct Kernel(Socket);

impl Kernel {
    /// Opens the calling thread's netns.
    pub(super) fn open() -> io::Result<Self> {
        Socket::open(SockProtocol::NetlinkRoute).map(Self)
    }

    /// Returns only rules that look up a table and match nothing but the interface or a single address.
    pub(super) fn rules(&mut self) -> Result<Vec<Rule>, KernelError> {
        let mut found = Vec::new();
        for family in Family::ALL {
            let act = format!("read the node's {family} ip rules");
            let rules = self
                .0
                .rules(&act, family, usize::MAX, |header, attributes| {
                    rule(family, header, attributes)
                })?;
            found.extend(rules);
        }
        Ok(found)
    }

    /// Returns those to single addresses, by an existing interface.
    pub(super) fn routes(&mut self) -> Result<Vec<Route>, KernelError> {
        let mut found = Vec::new();
        for family in Family::ALL {
            let act = format!("read the node's {family} routes");
            let routes = self.0.routes(&act, family, |header, attributes| {
                let is_to_one =
                    header.rtm_dst_len == bits(family) && header.rtm_type == TYPE_UNICAST;
                let route = || {
                    let name = if_indextoname(attributes.get_oif().ok()?).ok()?;
                    Some(Route {
                        table: attributes.get_table().ok()?,
                        to: attributes.get_dst().ok()?,
                        interface: name.to_str().ok()?.to_owned(),
                    })
                };
                is_to_one.then(route).flatten()
            })?;
            found.extend(routes);
        }
        Ok(found)
    }

    /// Adds missing rules. If one fails, those added are deleted.
    pub(super) fn add(&mut self, rules: &[Rule]) -> Result<(), KernelError> {
        let mut added = Vec::new();
        for rule in rules {
            let request = rt_rule::Request::new().set_create().set_excl();
            let mut request = request.op_newrule_do(&header(rule));
            describe(rule, request.encode());
            match self.0.execute("add an ip rule for probes", &request) {
                Ok(()) => added.push(rule.clone()),
                Err(error) if error.is(nix::Error::EEXIST) => {}
                Err(error) => {
                    if let Err(error) = self.delete(&added) {
                        tracing::warn!(%error, "Cannot delete an ip rule for probes");
                    }
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    pub(super) fn delete(&mut self, rules: &[Rule]) -> Result<(), KernelError> {
        for rule in rules {
            let mut request = rt_rule::Request::new().op_delrule_do(&header(rule));
            describe(rule, request.encode());
            match self.0.execute("delete an ip rule for probes", &request) {
                Err(error) if error.is(nix::Error::ENOENT) => {}
                result => result?,
            }
        }
        Ok(())
    }
}

fn bits(family: Family) -> u8 {
    match family {
        Family::V4 => 32,
        Family::V6 => 128,
    }
}

fn header(rule: &Rule) -> FibRuleHdr {
    FibRuleHdr {
        family: rule.family.number(),
        dst_len: rule.to.map_or(0, |_| bits(rule.family)),
        action: TO_TABLE,
        ..FibRuleHdr::new()
    }
}

fn describe<P: Pusher>(rule: &Rule, attributes: PushFibRuleAttrs<P>) {
    let attributes = attributes.push_priority(rule.priority);
    let attributes = attributes.push_table(rule.table);
    let mut attributes = attributes.push_protocol(rule.protocol);
    if let Some(address) = rule.to {
        attributes = attributes.push_dst(address);
    }
    if let Some(name) = &rule.arrives_by {
        attributes = attributes.push_iifname_bytes(name.as_bytes());
    }
    drop(attributes);
}

/// Returns `None` if it has other selectors, or another action than a table lookup.
fn rule(family: Family, header: &FibRuleHdr, attributes: IterableFibRuleAttrs<'_>) -> Option<Rule> {
    let to: Option<IpAddr> = attributes.get_dst().ok();
    let is_plain = header.action == TO_TABLE
        && (header.src_len, header.tos) == (0, 0)
        && header.dst_len == to.map_or(0, |_| bits(family))
        && !attributes
            .flatten()
            .any(|attribute| has_other_selector(&attribute));
    let arrives_by = attributes.get_iifname().ok();
    is_plain.then(|| Rule {
        family,
        // 0 is omitted by the kernel.
        priority: attributes.get_priority().unwrap_or(0),
        table: attributes
            .get_table()
            .unwrap_or_else(|_| header.table.into()),
        protocol: attributes.get_protocol().unwrap_or(0),
        arrives_by: arrives_by.map(|name| name.to_string_lossy().into_owned()),
        to,
    })
}

fn has_other_selector(attribute: &FibRuleAttrs<'_>) -> bool {
    let selects = matches!(attribute, FibRuleAttrs::Src(_) | FibRuleAttrs::Fwmark(_));
    selects || narrows(attribute)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use nix::sched::{CloneFlags, unshare};

    use super::*;

    fn leading(priority: u32, arrives_by: Option<&str>) -> Rule {
        Rule {
            family: Family::V4,
            priority,
            table: 101,
            protocol: super::super::PROTOCOL,
            arrives_by: arrives_by.map(str::to_owned),
            to: None,
        }
    }

    /// Runs in a netns that ends with the thread. Needs root.
    fn in_a_new_netns(test: fn(Kernel)) {
        let run = move || {
            unshare(CloneFlags::CLONE_NEWNET).expect("this test makes a netns: run it as root");
            test(Kernel::open().unwrap());
        };
        thread::spawn(run).join().unwrap();
    }

    #[test]
    fn when_the_second_rule_is_refused_the_first_one_goes_unless_it_was_there() {
        in_a_new_netns(|mut kernel| {
            let count = |kernel: &mut Kernel| kernel.rules().unwrap().len();
            let before = count(&mut kernel);
            let refused = leading(9, Some("longer-than-any-interface"));
            let both = [leading(512, None), refused];
            kernel.add(&both).unwrap_err();
            assert_eq!(count(&mut kernel), before);
            kernel.add(&both[..1]).unwrap();
            kernel.add(&both).unwrap_err();
            assert_eq!(count(&mut kernel), before + 1);
        });
    }

    #[test]
    fn rules_are_read_as_they_were_written_and_deleted_once() {
        in_a_new_netns(|mut kernel| {
            let to = Rule {
                to: Some("fd00::5".parse().unwrap()),
                family: Family::V6,
                table: 1000,
                ..leading(512, None)
            };
            let rules = [leading(0, Some("vlana")), to];
            kernel.add(&rules).unwrap();
            let found = kernel.rules().unwrap();
            assert!(rules.iter().all(|rule| found.contains(rule)), "{found:?}");
            for _ in 0..2 {
                kernel.delete(&rules).unwrap();
            }
            let found = kernel.rules().unwrap();
            assert!(!rules.iter().any(|rule| found.contains(rule)), "{found:?}");
        });
    }
}
