//! The way back to ztunnel: what is marked for it is delivered to this netns, whatever its destination. One ip rule
//! and one route per family, each of its own, so that a missing one never hides another.

mod kernel;

pub(crate) use kernel::Routes;

use std::fmt;

use crate::{
    family::Family,
    marks::{RULE_PRIORITY, TABLE, TO_ZTUNNEL},
    netlink::route::PROTOCOL,
};

/// One of the two things that a family needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// `local default dev lo table 100`.
    Route,
    /// `fwmark 0x111/0xfff pref 32764 lookup 100`.
    Rule,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Route => write!(f, "route `local default dev lo table {TABLE}`"),
            Self::Rule => {
                write!(
                    f,
                    "ip rule `fwmark {TO_ZTUNNEL} pref {RULE_PRIORITY} lookup {TABLE}`"
                )
            }
        }
    }
}

/// Something of a family.
pub(crate) type Item = (Family, Part);

/// In the order in which they are added: a rule must not lead to an empty table.
pub(crate) const ORDER: [Part; 2] = [Part::Route, Part::Rule];

/// What adds, replaces or deletes an item, in the words of ip.
pub(crate) fn command(verb: &str, (family, part): Item) -> String {
    let ip = match family {
        Family::V4 => "ip",
        Family::V6 => "ip -6",
    };
    match part {
        Part::Route => {
            format!("{ip} route {verb} local default dev lo table {TABLE} proto {PROTOCOL}")
        }
        Part::Rule => {
            let verb = if verb == "replace" { "add" } else { verb };
            format!(
                "{ip} rule {verb} fwmark {TO_ZTUNNEL} pref {RULE_PRIORITY} lookup {TABLE} protocol {PROTOCOL}"
            )
        }
    }
}

/// What is there.
#[derive(Clone, Debug, Default)]
pub(crate) struct Routing {
    ours: Vec<Item>,
    equal: Vec<Item>,
}

impl Routing {
    /// Whether something does what the item does, ours or not.
    pub(crate) fn has(&self, item: Item) -> bool {
        self.has_ours(item) || self.equal.contains(&item)
    }

    /// Whether the item is there and ours.
    pub(crate) fn has_ours(&self, item: Item) -> bool {
        self.ours.contains(&item)
    }

    /// What does the same as ours, and is not.
    pub(crate) fn equal(&self) -> Vec<Item> {
        self.equal.clone()
    }

    /// All of ours, in the order in which they go: nothing is led to a table that is empty.
    pub(crate) fn ours(&self) -> Vec<Item> {
        let parts = ORDER.into_iter().rev();
        let items = parts.flat_map(|part| Family::ALL.map(|family| (family, part)));
        items.filter(|item| self.has_ours(*item)).collect()
    }

    fn note(&mut self, item: Item, protocol: u8) {
        let list = if protocol == PROTOCOL {
            &mut self.ours
        } else {
            &mut self.equal
        };
        list.push(item);
    }
}
