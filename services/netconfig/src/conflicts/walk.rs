use std::collections::BTreeSet;

use super::{
    owner,
    ruleset::{Chain, Effect, Packet, Table},
};

/// Rules to evaluate: any process with NET_ADMIN in the netns can add rules, and must not keep netconfig busy.
pub(super) const BUDGET: usize = 1_000_000;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Event {
    pub(super) chain: String,
    pub(super) effect: Effect,
    /// After a jump to inpod's chains.
    pub(super) is_after_ours: bool,
}

#[derive(Debug, Default)]
pub(super) struct Walk {
    pub(super) events: Vec<Event>,
    pub(super) meets_ours: bool,
    /// May reach the base chain's policy.
    pub(super) reaches_policy: bool,
}

/// Does not enter chains of inpod or Istio's node agent.
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
    /// Each chain is followed once: paths may multiply at every jump.
    visited: BTreeSet<&'a str>,
    walk: Walk,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// Certainly leaves the base chain.
    Decided,
    /// May return to the calling chain.
    Back,
}

impl<'a> Walker<'a> {
    fn follow(&mut self, chain: &'a Chain, is_base: bool) -> End {
        for rule in &chain.rules {
            let Some(left) = self.budget.checked_sub(1) else {
                return End::Back;
            };
            *self.budget = left;
            if !rule.may_match(self.packet) {
                continue;
            }
            let mut end = None;
            for effect in &rule.effects {
                end = self.apply(chain, is_base, effect);
            }
            if let (true, Some(end)) = (rule.is_certain(self.packet), end) {
                return end;
            }
        }
        End::Back
    }

    /// Returns the end of the path if the effect takes place.
    fn apply(&mut self, chain: &'a Chain, is_base: bool, effect: &Effect) -> Option<End> {
        match effect {
            Effect::Jump(to) => match self.enter(to) {
                End::Decided => Some(End::Decided),
                End::Back => None,
            },
            Effect::Goto(to) => Some(self.enter(to)),
            Effect::JumpToAny => {
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
            Effect::Return if !is_base => Some(End::Back),
            Effect::Return => {
                self.record(chain, effect);
                Some(End::Back)
            }
            Effect::Accept | Effect::Drop | Effect::Translate => {
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

    fn record(&mut self, chain: &Chain, effect: &Effect) {
        self.walk.events.push(Event {
            chain: chain.name.clone(),
            effect: effect.clone(),
            is_after_ours: self.walk.meets_ours,
        });
    }
}
