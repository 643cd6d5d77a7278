//! Describes the routing needed by a redirection. Per recipient and family, an ip rule and a route table deliver
//! marked packets locally; each recipient has its own table, so that a missing route never hides another. A
//! sidecar's redirection also needs the IPv6 source address of the proxy's calls to the application.

mod kernel;

pub(crate) use kernel::Routes;

use std::fmt;

use crate::{
    family::Family,
    marks::{FROM_PROXY, Mark, PROXY_TABLE, RULE_PRIORITY, TO_PROXY, TO_ZTUNNEL, ZTUNNEL_TABLE},
    netlink::route::PROTOCOL,
    rules::{Form, sidecar::PASSTHROUGH_V6},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Recipient {
    /// ztunnel, which receives replies in ambient mode.
    Ztunnel,
    /// A sidecar's proxy, which receives replies and packets captured by TPROXY.
    Proxy,
}

impl Recipient {
    const ALL: [Self; 2] = [Self::Ztunnel, Self::Proxy];

    /// Returns the mark that selects the recipient's table.
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// `::6/128 dev lo`, for IPv6 only.
    Address,
    /// `local default dev lo table 100`.
    Route(Recipient),
    /// `fwmark 0x111/0xfff pref 32764 lookup 100`.
    Rule(Recipient),
    /// An ip rule of Istio's sidecar installer, at the given priority. The rule compares the whole mark, and each
    /// run of the installer adds another rule (services/docs/facts/istio-sidecar.md, 4.4.2).
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

pub(crate) type Item = (Family, Part);

/// The order of addition, because an ip rule must not refer to an empty table.
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

/// Returns the items needed by a form, in the order of addition.
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

/// Renders a command of ip with the verb (add, replace, delete).
pub(crate) fn command(verb: &str, (family, part): Item) -> String {
    let ip = match family {
        Family::V4 => "ip",
        Family::V6 => "ip -6",
    };
    let rule_verb = if verb == "replace" { "add" } else { verb };
    match part {
        // The command has no protocol, since ip supports protocols of addresses only from iproute2 6.3.
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

#[derive(Clone, Debug, Default)]
pub(crate) struct Routing {
    ours: Vec<Item>,
    equivalent: Vec<Item>,
    /// Ip rules of Istio's sidecar installer.
    incumbents: Vec<Item>,
    /// Foreign ip rules that match a mark of ztunnel's packets before the main table: family, priority and mark.
    foreign_rules: Vec<(Family, u32, Mark)>,
    /// True if the kernel reports the protocol of addresses.
    reports_protocols: bool,
}

impl Routing {
    /// Returns whether an item exists; equivalents of other origin count.
    pub(crate) fn has(&self, item: Item) -> bool {
        self.has_ours(item) || self.equivalent.contains(&item)
    }

    /// Returns whether an item exists with inpod's protocol.
    pub(crate) fn has_ours(&self, item: Item) -> bool {
        self.ours.contains(&item)
    }

    /// Returns foreign items equivalent to inpod's routing to ztunnel, as Istio's node agent adds them.
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

    pub(crate) fn foreign_rules(&self) -> &[(Family, u32, Mark)] {
        &self.foreign_rules
    }

    pub(crate) fn incumbents(&self) -> &[Item] {
        &self.incumbents
    }

    /// Returns inpod's items in the order of deletion, since no ip rule may refer to an empty table. If the kernel
    /// does not report protocols, the address counts as inpod's if inpod's tables use the address.
    pub(crate) fn ours(&self, uses_address: bool) -> Vec<Item> {
        let is_ours = |item: &Item| {
            let may_be_ours = item.1 == Part::Address && !self.reports_protocols && uses_address;
            self.has_ours(*item) || (may_be_ours && self.equivalent.contains(item))
        };
        in_order().rev().filter(is_ours).collect()
    }

    /// Completes the items that the kernel drops while `lo` is down.
    pub(crate) fn with_loopback_items(mut self, needed: &[Item]) -> Self {
        let is_dropped = |(_, part): &Item| matches!(part, Part::Address | Part::Route(_));
        let missing = needed.iter().filter(|item| !self.has(**item));
        let dropped: Vec<_> = missing.copied().filter(is_dropped).collect();
        self.ours.extend(dropped);
        self
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
    fn routes_and_addresses_are_lost_with_lo_and_ip_rules_are_not() {
        for form in Form::ALL {
            let needed = needed(form, &Family::ALL);
            let routing = Routing::default().with_loopback_items(&needed);
            for item in needed {
                let is_rule = matches!(item.1, Part::Rule(_));
                assert_eq!(routing.has(item), !is_rule, "{item:?}");
            }
        }
    }

    #[test]
    fn each_form_needs_its_own_and_rules_come_after_routes() {
        let described = |form, families: &[Family]| -> Vec<String> {
            let items = needed(form, families).into_iter();
            items
                .map(|(family, part)| format!("{family} {part}"))
                .collect()
        };
        assert_eq!(
            described(Form::Ambient, &Family::ALL),
            [
                "IPv4 route `local default dev lo table 100`",
                "IPv6 route `local default dev lo table 100`",
                "IPv4 ip rule `fwmark 0x111/0xfff pref 32764 lookup 100`",
                "IPv6 ip rule `fwmark 0x111/0xfff pref 32764 lookup 100`",
            ]
        );
        assert_eq!(described(Form::Sidecar, &[Family::V4]), [""; 0]);
        let address = "IPv6 address `::6/128 dev lo`";
        assert_eq!(described(Form::Sidecar, &Family::ALL), [address]);
        let by_tproxy = described(Form::SidecarByTproxy, &Family::ALL);
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
