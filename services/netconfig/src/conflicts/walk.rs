//! The way of a packet through the chains that it may reach from a base chain.

use std::collections::BTreeSet;

use super::{
    op::Verdict,
    owner,
    packet::{Effect, Packet, evaluate},
    ruleset::{Chain, Table},
};

/// How many rules are looked at, in all walks of one look: who may write rules in a netns must not keep netconfig busy.
pub(super) const BUDGET: usize = 1_000_000;

/// What may happen to the packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Event {
    /// In which chain the rule is.
    pub(super) chain: String,
    pub(super) effect: Effect,
    /// Whether a jump to a chain of ours comes before.
    pub(super) is_after_ours: bool,
}

/// A walk.
#[derive(Debug, Default)]
pub(super) struct Walk {
    /// What may happen, in order.
    pub(super) events: Vec<Event>,
    /// Whether the packet meets a chain of ours.
    pub(super) meets_ours: bool,
    /// Whether it may reach the policy.
    pub(super) reaches_policy: bool,
}

/// Follows a packet through a base chain. Chains of ours, and of Istio's node agent, are left out.
pub(super) fn walk(table: &Table, base: &Chain, packet: Packet, budget: &mut usize) -> Walk {
    let mut walker = Walker {
        table,
        packet,
        budget,
        visited: BTreeSet::new(),
        walk: Walk::default(),
    };
    let end = walker.follow(base, true);
    walker.walk.reaches_policy = end == End::Back;
    walker.walk
}

struct Walker<'a> {
    table: &'a Table,
    packet: Packet,
    budget: &'a mut usize,
    /// A chain is followed once: what happens in it is known then, and a way that doubles at every jump stays short.
    visited: BTreeSet<&'a str>,
    walk: Walk,
}

/// Where the way through a chain leads.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// Out of the base chain, for certain.
    Decided,
    /// Perhaps back to where it came from.
    Back,
}

impl<'a> Walker<'a> {
    fn follow(&mut self, chain: &'a Chain, is_base: bool) -> End {
        for rule in &chain.rules {
            let Some(left) = self.budget.checked_sub(1) else {
                return End::Back;
            };
            *self.budget = left;
            let outcome = evaluate(rule, self.packet);
            let mut end = None;
            for effect in outcome.effects {
                end = self.apply(chain, is_base, effect);
            }
            if let (true, Some(end)) = (outcome.is_certain, end) {
                return end;
            }
        }
        End::Back
    }

    /// What an effect ends, where it comes about.
    fn apply(&mut self, chain: &'a Chain, is_base: bool, effect: Effect) -> Option<End> {
        match &effect {
            Effect::Decide(Verdict::Jump(to)) => match self.enter(to) {
                End::Decided => Some(End::Decided),
                End::Back => None,
            },
            Effect::Decide(Verdict::Goto(to)) => Some(self.enter(to)),
            Effect::DecideByMap => {
                for other in self
                    .table
                    .chains
                    .iter()
                    .filter(|other| other.base.is_none())
                {
                    self.enter(&other.name);
                }
                None
            }
            Effect::Decide(Verdict::Return) if !is_base => Some(End::Back),
            Effect::Decide(Verdict::Return) => {
                self.record(chain, effect);
                Some(End::Back)
            }
            Effect::Decide(Verdict::Accept | Verdict::Drop) | Effect::Translate => {
                self.record(chain, effect);
                Some(End::Decided)
            }
            Effect::Untrack | Effect::Mark(_) => {
                self.record(chain, effect);
                None
            }
        }
    }

    fn enter(&mut self, name: &str) -> End {
        let Some(chain) = self.table.chain(name) else {
            return End::Back;
        };
        if owner::is_our_chain(name) {
            self.walk.meets_ours = true;
            return End::Back;
        }
        if owner::is_incumbents_chain(self.table, name) || !self.visited.insert(&chain.name) {
            return End::Back;
        }
        self.follow(chain, false)
    }

    fn record(&mut self, chain: &Chain, effect: Effect) {
        self.walk.events.push(Event {
            chain: chain.name.clone(),
            effect,
            is_after_ours: self.walk.meets_ours,
        });
    }
}
