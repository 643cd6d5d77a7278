//! Rules by way of iptables' own programs, for nodes that need them.

mod error;

pub use error::ProgramError;

use netns::Netns;

use crate::{
    backend::{BackendError, Change, Observed, RuleBackend},
    rules::{Ruleset, Table},
};

/// Which iptables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// On nf_tables.
    Nft,
    /// On the kernel's own tables.
    Legacy,
}

/// The programs of iptables on this machine, where they are.
#[derive(Clone, Debug, Default)]
pub struct Programs {}

impl Programs {
    /// Whether those of a variant were found.
    pub fn has(&self, _variant: Variant) -> bool {
        false
    }
}

/// iptables in one netns.
#[derive(Debug)]
pub(crate) struct Iptables<'a> {
    _netns: &'a Netns,
    variant: Variant,
}

impl<'a> Iptables<'a> {
    pub(crate) fn new(_programs: &'a Programs, variant: Variant, netns: &'a Netns) -> Self {
        Self {
            _netns: netns,
            variant,
        }
    }
}

impl RuleBackend for Iptables<'_> {
    fn shape(&self, ruleset: &Ruleset) -> Vec<Table> {
        ruleset.tables.clone()
    }

    fn read(&mut self) -> Result<Observed, BackendError> {
        Err(ProgramError::Missing(self.variant).into())
    }

    fn change(&mut self, _seen: &Observed, _change: &Change) -> Result<(), BackendError> {
        Err(ProgramError::Missing(self.variant).into())
    }

    fn script(&self, _seen: &Observed, _change: &Change) -> String {
        String::new()
    }
}
