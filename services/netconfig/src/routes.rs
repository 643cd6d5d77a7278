//! What a redirection needs beside its tables: ways to whoever captures, by which what is marked for it is delivered to
//! this netns, whatever its destination, and the address of IPv6 from which a sidecar's proxy calls the application. A
//! way is one ip rule and one route per family, each of its own, so that a missing one never hides another.

mod kernel;

pub(crate) use kernel::Routes;

use std::fmt;

use crate::{
    family::Family,
    marks::{FROM_PROXY, Mark, PROXY_TABLE, RULE_PRIORITY, TO_PROXY, TO_ZTUNNEL, ZTUNNEL_TABLE},
    netlink::route::PROTOCOL,
    rules::{Form, sidecar::PASSTHROUGH_V6},
};

/// To whom a way leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Recipient {
    /// Replies, to ztunnel.
    Ztunnel,
    /// What TPROXY captured, and replies, to a sidecar's proxy.
    Proxy,
}

impl Recipient {
    const ALL: [Self; 2] = [Self::Ztunnel, Self::Proxy];

    /// What takes it.
    const fn mark(self) -> Mark {
        match self {
            Self::Ztunnel => TO_ZTUNNEL,
            Self::Proxy => TO_PROXY,
        }
    }

    const fn table(self) -> u8 {
        match self {
            Self::Ztunnel => ZTUNNEL_TABLE,
            Self::Proxy => PROXY_TABLE,
        }
    }
}

/// One of the things that a family may need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// `::6/128 dev lo`. Of IPv6 alone.
    Address,
    /// `local default dev lo table 100`.
    Route(Recipient),
    /// `fwmark 0x111/0xfff pref 32764 lookup 100`.
    Rule(Recipient),
    /// What Istio's sidecar installer writes for the same, at that priority: for its own mark, the whole of it, and once more
    /// each time that it runs (shared facts: services/docs/facts/istio-sidecar.md, 4.4.2).
    IncumbentRule(u32),
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address => write!(f, "address `{PASSTHROUGH_V6}/128 dev lo`"),
            Self::Route(recipient) => write!(
                f,
                "route `local default dev lo table {}`",
                recipient.table()
            ),
            Self::Rule(recipient) => {
                let (mark, table) = (recipient.mark(), recipient.table());
                write!(
                    f,
                    "ip rule `fwmark {mark} pref {RULE_PRIORITY} lookup {table}`"
                )
            }
            Self::IncumbentRule(priority) => {
                let mark = FROM_PROXY.value();
                write!(
                    f,
                    "ip rule `fwmark {mark:#x} pref {priority} lookup {PROXY_TABLE}`"
                )
            }
        }
    }
}

/// Something of a family.
pub(crate) type Item = (Family, Part);

/// What may be ours, in the order in which it is added: a rule must not lead to an empty table.
const ORDER: [Part; 5] = [
    Part::Address,
    Part::Route(Recipient::Ztunnel),
    Part::Route(Recipient::Proxy),
    Part::Rule(Recipient::Ztunnel),
    Part::Rule(Recipient::Proxy),
];

fn in_order() -> impl DoubleEndedIterator<Item = Item> {
    let of_part = |part| Family::ALL.map(|family| (family, part));
    ORDER.into_iter().flat_map(of_part)
}

/// What a redirection of these families needs, in the order in which it is added.
pub(crate) fn needed(form: Form, families: &[Family]) -> Vec<Item> {
    let is_needed = |(family, part): &Item| match part {
        Part::Address => *family == Family::V6 && form != Form::Ambient,
        Part::Route(Recipient::Ztunnel) | Part::Rule(Recipient::Ztunnel) => form == Form::Ambient,
        Part::Route(Recipient::Proxy) | Part::Rule(Recipient::Proxy) => {
            form == Form::SidecarByTproxy
        }
        Part::IncumbentRule(_) => false,
    };
    let items = in_order().filter(|(family, _)| families.contains(family));
    items.filter(is_needed).collect()
}

/// What adds, replaces or deletes an item, in the words of ip.
pub(crate) fn command(verb: &str, (family, part): Item) -> String {
    let ip = match family {
        Family::V4 => "ip",
        Family::V6 => "ip -6",
    };
    let rule_verb = if verb == "replace" { "add" } else { verb };
    match part {
        // Without who made it: ip takes that since iproute2 6.3.
        Part::Address => format!("{ip} addr {verb} {PASSTHROUGH_V6}/128 dev lo"),
        Part::Route(recipient) => {
            let table = recipient.table();
            format!("{ip} route {verb} local default dev lo table {table} proto {PROTOCOL}")
        }
        Part::Rule(recipient) => {
            let (mark, table) = (recipient.mark(), recipient.table());
            format!(
                "{ip} rule {rule_verb} fwmark {mark} pref {RULE_PRIORITY} lookup {table} protocol {PROTOCOL}"
            )
        }
        Part::IncumbentRule(priority) => {
            let mark = FROM_PROXY.value();
            format!("{ip} rule {rule_verb} fwmark {mark:#x} pref {priority} lookup {PROXY_TABLE}")
        }
    }
}

/// What is there.
#[derive(Clone, Debug, Default)]
pub(crate) struct Routing {
    ours: Vec<Item>,
    equivalent: Vec<Item>,
    /// Ip rules of Istio's sidecar installer.
    incumbents: Vec<Item>,
    /// Whether the kernel tells who made an address.
    reports_protocols: bool,
}

impl Routing {
    /// Whether something does what the item does, ours or not.
    pub(crate) fn has(&self, item: Item) -> bool {
        self.has_ours(item) || self.equivalent.contains(&item)
    }

    /// Whether the item is there and ours.
    pub(crate) fn has_ours(&self, item: Item) -> bool {
        self.ours.contains(&item)
    }

    /// What does the same as Istio's node agent's, and is not ours.
    pub(crate) fn equivalent_for_ztunnel(&self) -> Vec<Item> {
        let is_for_ztunnel = |part: Part| {
            matches!(
                part,
                Part::Route(Recipient::Ztunnel) | Part::Rule(Recipient::Ztunnel)
            )
        };
        let equivalent = self.equivalent.iter().copied();
        equivalent
            .filter(|(_, part)| is_for_ztunnel(*part))
            .collect()
    }

    /// What Istio's sidecar installer left.
    pub(crate) fn incumbents(&self) -> &[Item] {
        &self.incumbents
    }

    /// All of ours, in the order in which they go: nothing is led to a table that is empty. An address of which the
    /// kernel does not tell who made it is ours where our tables make use of it.
    pub(crate) fn ours(&self, uses_address: bool) -> Vec<Item> {
        let is_ours = |item: &Item| {
            let may_be_ours = item.1 == Part::Address && !self.reports_protocols && uses_address;
            self.has_ours(*item) || (may_be_ours && self.equivalent.contains(item))
        };
        in_order().rev().filter(is_ours).collect()
    }

    fn record(&mut self, item: Item, protocol: u8) {
        let list = if protocol == PROTOCOL {
            &mut self.ours
        } else {
            &mut self.equivalent
        };
        list.push(item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_form_needs_its_own_and_rules_come_after_routes() {
        let told = |form, families: &[Family]| -> Vec<String> {
            let items = needed(form, families).into_iter();
            items
                .map(|(family, part)| format!("{family} {part}"))
                .collect()
        };
        assert_eq!(
            told(Form::Ambient, &Family::ALL),
            [
                "IPv4 route `local default dev lo table 100`",
                "IPv6 route `local default dev lo table 100`",
                "IPv4 ip rule `fwmark 0x111/0xfff pref 32764 lookup 100`",
                "IPv6 ip rule `fwmark 0x111/0xfff pref 32764 lookup 100`",
            ]
        );
        assert_eq!(told(Form::Sidecar, &[Family::V4]), [""; 0]);
        let address = "IPv6 address `::6/128 dev lo`";
        assert_eq!(told(Form::Sidecar, &Family::ALL), [address]);
        let by_tproxy = told(Form::SidecarByTproxy, &Family::ALL);
        assert_eq!(by_tproxy.len(), 5);
        assert_eq!(by_tproxy[0], address);
        assert_eq!(
            by_tproxy[4],
            "IPv6 ip rule `fwmark 0x53b/0xfff pref 32764 lookup 133`"
        );
    }

    #[test]
    fn an_address_of_an_unknown_maker_is_ours_only_where_our_tables_use_it() {
        let address = (Family::V6, Part::Address);
        let mut routing = Routing::default();
        routing.record(address, 0);
        assert_eq!(routing.ours(true), [address]);
        assert_eq!(routing.ours(false), []);
        routing.reports_protocols = true;
        assert_eq!(routing.ours(true), []);
        routing.record(address, PROTOCOL);
        assert_eq!(routing.ours(false), [address]);
    }
}
