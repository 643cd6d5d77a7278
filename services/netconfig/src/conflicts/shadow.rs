//! Finds foreign rules that take effect before inpod's.

use super::{
    Finding, Kind,
    owner::{self, printable, table_name},
    ruleset::{Base, Chain, Effect, Hook, MarkOf, OUR_BITS, Packet, Table},
    walk::{BUDGET, Event, Walk, walk},
};
use crate::marks::{FROM_ZTUNNEL, TO_ZTUNNEL};

/// inpod's NAT chains in every backend (NF_IP_PRI_NAT_DST).
const NAT_PRIORITY: i32 = -100;

/// Connection tracking (NF_IP_PRI_CONNTRACK): untracking has to come before.
const TRACKING_PRIORITY: i32 = -200;

pub(super) fn findings(tables: &[Table]) -> Vec<Finding> {
    let captures_dns = captures_dns(tables);
    let mut budget = BUDGET;
    let mut found = incumbents(tables);
    for table in tables {
        if owner::is_our_table(table) || owner::is_incumbents_table(table) {
            continue;
        }
        for (chain, base) in base_chains(table) {
            let foreign = ForeignChain {
                table,
                chain,
                base,
                order: nat_order(tables, table, base),
            };
            for packet in packets(captures_dns) {
                let walk = walk(table, chain, packet, &mut budget);
                // Several packets can meet the same rule.
                for finding in foreign.findings_for(packet, &walk) {
                    if !found.contains(&finding) {
                        found.push(finding);
                    }
                }
            }
        }
    }
    if budget == 0 {
        tracing::warn!("The netns has too many rules; conflicts may be missing");
    }
    found
}

fn base_chains(table: &Table) -> impl Iterator<Item = (&Chain, Base)> {
    let chains = table.chains.iter();
    chains.filter_map(|chain| Some((chain, chain.base?)))
}

fn incumbents(tables: &[Table]) -> Vec<Finding> {
    let left = tables.iter().filter_map(|table| {
        let name = table_name(table);
        if owner::is_incumbents_table(table) {
            Some(name)
        } else if owner::holds_incumbents_chains(table) {
            Some(format!("{name}, chains ISTIO_*"))
        } else {
            None
        }
    });
    left.map(|subject| Finding {
        kind: Kind::Incumbent,
        sentence: "Istio's node agent left rules here, which the next ApplyRules replaces."
            .to_owned(),
        subject,
    })
    .collect()
}

/// Returns TCP and, if captured, DNS queries. Verdicts and NAT matter only for packets that begin a
/// connection, marks for all.
fn packets(captures_dns: bool) -> Vec<Packet> {
    let mut packets = Vec::new();
    for is_new in [true, false] {
        packets.extend([false, true].map(|is_dns| Packet { is_dns, is_new }));
    }
    packets.retain(|packet| captures_dns || !packet.is_dns);
    packets
}

fn captures_dns(tables: &[Table]) -> bool {
    let query = Packet {
        is_dns: true,
        is_new: true,
    };
    tables.iter().any(|table| {
        let is_ours =
            |chain: &&Chain| owner::is_our_table(table) || owner::is_our_chain(&chain.name);
        let mut rules = table
            .chains
            .iter()
            .filter(is_ours)
            .flat_map(|chain| &chain.rules);
        rules.any(|rule| rule.effects.contains(&Effect::Translate) && rule.may_match(query))
    })
}

/// The order relative to inpod's NAT chain at the hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NatOrder {
    PriorityBefore,
    /// Of equal priorities, the last registered comes first (nf_nat_register_fn in
    /// net/netfilter/nf_nat_core.c inserts before equals).
    RegisteredLater,
    RegisteredEarlier,
    OursMissing,
    PriorityAfter,
}

fn nat_order(tables: &[Table], table: &Table, base: Base) -> NatOrder {
    if base.priority != NAT_PRIORITY {
        return if base.priority < NAT_PRIORITY {
            NatOrder::PriorityBefore
        } else {
            NatOrder::PriorityAfter
        };
    }
    let ours = tables.iter().find(|ours| is_our_nat(ours, table));
    match ours {
        None => NatOrder::OursMissing,
        Some(ours) if ours.handle < table.handle => NatOrder::RegisteredLater,
        Some(_) => NatOrder::RegisteredEarlier,
    }
}

/// Returns whether a table has inpod's NAT chains, for packets that the other one sees, too.
fn is_our_nat(table: &Table, other: &Table) -> bool {
    let sees_same = [false, true]
        .into_iter()
        .any(|is_ipv6| table.family.sees(is_ipv6) && other.family.sees(is_ipv6));
    let has_ours = owner::is_our_table(table)
        || table
            .chains
            .iter()
            .any(|chain| owner::is_our_chain(&chain.name));
    sees_same && has_ours && base_chains(table).any(|(_, base)| base.is_nat)
}

struct ForeignChain<'a> {
    table: &'a Table,
    chain: &'a Chain,
    base: Base,
    order: NatOrder,
}

impl ForeignChain<'_> {
    fn findings_for(&self, packet: Packet, walk: &Walk) -> Vec<Finding> {
        let mut found: Vec<_> = walk
            .events
            .iter()
            .filter_map(|event| self.finding_for(packet, walk, event))
            .collect();
        if packet.is_new && walk.reaches_policy && self.base.drops && self.runs_before_ours() {
            let what =
                "drops packets without a verdict by its policy, before inpod's rules see them";
            found.push(self.finding(Kind::EarlyVerdict, &self.chain.name, what));
        }
        found
    }

    fn finding_for(&self, packet: Packet, walk: &Walk, event: &Event) -> Option<Finding> {
        let before_our_jump = walk.meets_ours && !event.is_after_ours;
        let (kind, what) = match &event.effect {
            Effect::Mark(of) if self.mark_matters(*of) => (Kind::UnmaskedMark, mark_text(*of)),
            _ if !packet.is_new => return None,
            Effect::Translate if before_our_jump => {
                (Kind::NatChain, TRANSLATES_BEFORE_JUMP.to_owned())
            }
            Effect::Translate if !walk.meets_ours => (Kind::NatChain, self.translates()?),
            Effect::Drop if before_our_jump || (!walk.meets_ours && self.runs_before_ours()) => (
                Kind::EarlyVerdict,
                "drops packets before inpod's rules see them".to_owned(),
            ),
            // Elsewhere they only end this base chain.
            Effect::Accept | Effect::Return if before_our_jump => {
                (Kind::EarlyVerdict, DECIDES_BEFORE_JUMP.to_owned())
            }
            Effect::Untrack if self.untracks() => (Kind::EarlyVerdict, UNTRACKS.to_owned()),
            Effect::Mark(_)
            | Effect::Translate
            | Effect::Untrack
            | Effect::Accept
            | Effect::Drop
            | Effect::Return
            | Effect::Jump(_)
            | Effect::Goto(_)
            | Effect::JumpToAny => return None,
        };
        Some(self.finding(kind, &event.chain, &what))
    }

    /// Returns whether packets certainly come here before inpod's NAT chains.
    fn runs_before_ours(&self) -> bool {
        match self.base.hook {
            Hook::Ingress => true,
            Hook::Prerouting | Hook::Output => match self.order {
                NatOrder::PriorityBefore => true,
                NatOrder::RegisteredLater => self.base.is_nat,
                NatOrder::RegisteredEarlier | NatOrder::OursMissing | NatOrder::PriorityAfter => {
                    false
                }
            },
            Hook::Input | Hook::Forward | Hook::Postrouting | Hook::Egress => false,
        }
    }

    fn untracks(&self) -> bool {
        matches!(self.base.hook, Hook::Prerouting | Hook::Output)
            && self.base.priority < TRACKING_PRIORITY
    }

    /// Packet marks are read in prerouting and output. Packets from ztunnel to the application pass postrouting and
    /// return by lo with their mark, so it matters there, too. Connection marks persist.
    fn mark_matters(&self, of: MarkOf) -> bool {
        match (of, self.base.hook) {
            (
                MarkOf::Packet,
                Hook::Ingress | Hook::Prerouting | Hook::Output | Hook::Postrouting | Hook::Egress,
            )
            | (MarkOf::Connection, _) => true,
            (MarkOf::Packet, Hook::Input | Hook::Forward) => false,
        }
    }

    fn translates(&self) -> Option<String> {
        if !matches!(self.base.hook, Hook::Prerouting | Hook::Output) {
            return None;
        }
        let what = match self.order {
            NatOrder::PriorityAfter => return None,
            NatOrder::PriorityBefore => {
                "translates connections before inpod's rules: they do not go to ztunnel"
            }
            NatOrder::RegisteredLater => {
                "translates connections at the priority of inpod's rules and was created later, so that it comes \
                 first: they do not go to ztunnel"
            }
            NatOrder::RegisteredEarlier => {
                "translates connections at the priority of inpod's rules and is in an older table, so that inpod's \
                 rules come first; if it is created again it comes first, and connections do not go to ztunnel"
            }
            NatOrder::OursMissing => {
                "translates connections at the priority of inpod's rules, which are missing; once applied they come \
                 first, until this chain is created again"
            }
        };
        Some(what.to_owned())
    }

    fn finding(&self, kind: Kind, chain: &str, what: &str) -> Finding {
        let (own, base) = (printable(chain), printable(&self.chain.name));
        let way = if chain == self.chain.name {
            String::new()
        } else {
            format!(", reached from {base},")
        };
        let (hook, priority) = (self.base.hook.name(), self.base.priority);
        let table = table_name(self.table);
        Finding {
            kind,
            subject: format!("{table}, chain {own}"),
            sentence: format!(
                "Chain {own} of {table}{way} (hook {hook}, priority {priority}) {what}."
            ),
        }
    }
}

/// In an iptables chain that jumps to inpod's.
const TRANSLATES_BEFORE_JUMP: &str =
    "translates connections before the jump to inpod's rules: they do not go to ztunnel";

const DECIDES_BEFORE_JUMP: &str =
    "gives a verdict before the jump to inpod's rules, which do not see these packets";

const UNTRACKS: &str =
    "excludes packets from connection tracking, so that inpod's NAT rules do not see them";

fn mark_text(of: MarkOf) -> String {
    match of {
        MarkOf::Packet => format!(
            "overwrites the bits {OUR_BITS:#x} of packet marks: without its mark {FROM_ZTUNNEL}, ztunnel's own \
             traffic is captured, and without {TO_ZTUNNEL}, replies to ztunnel leave the pod"
        ),
        MarkOf::Connection => format!(
            "overwrites the bits {OUR_BITS:#x} of connection marks: without the mark {TO_ZTUNNEL}, replies to \
             ztunnel leave the pod"
        ),
    }
}
