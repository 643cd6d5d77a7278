//! The interface of the probe set's backends: nf_tables, or ipset with an iptables rule.

use std::{fmt, net::IpAddr, time::Duration};

use super::{ProbeSetError, refcount::Elements, selector::Selected, settings::ProbeSettings};
use crate::family::Family;

pub(crate) trait SetBackend: fmt::Debug + Send {
    /// Returns the families of addresses that the backend can hold. Addresses of others are ignored.
    fn families(&self) -> &'static [Family];

    /// Reads the set and its rule. Returns `None` if there is none of ours.
    fn read(
        &mut self,
        selected: &Selected,
        settings: &ProbeSettings,
    ) -> Result<Option<ObservedSet>, ProbeSetError>;

    /// Writes the set and its rule as a whole. Elements and rules that stay are never absent.
    fn write(
        &mut self,
        selected: &Selected,
        settings: &ProbeSettings,
        elements: &Elements,
    ) -> Result<(), ProbeSetError>;

    /// Adds elements that are believed to be new. Returns `None`, and adds none of them, if one already exists.
    fn add(
        &mut self,
        requester: &str,
        addresses: &[IpAddr],
    ) -> Result<Option<UpdateOutcome>, ProbeSetError>;

    /// Changes elements on behalf of one owner.
    fn update_owners(
        &mut self,
        requester: &str,
        desired: &[DesiredOwner<'_>],
    ) -> Result<UpdateOutcome, ProbeSetError>;

    /// Removes everything, the rule first, and verifies that. Returns whether there was anything to remove.
    fn clear(&mut self) -> Result<bool, ProbeSetError>;

    /// Returns whether there are signs of a change. Takes microseconds.
    fn needs_read(&mut self, elements: &Elements) -> bool;

    /// Returns whether a change of an nf_tables table may concern the set, by the table's family (NFPROTO of
    /// linux/netfilter.h), its name, and the netlink port of the socket that made the change.
    fn is_relevant(&self, family: u8, table: &str, port: u32) -> bool;

    /// Returns the intervals of the calls of [`Self::needs_read`] and of unconditional reads, given the duration
    /// of the last read.
    fn intervals(&self, read_duration: Duration) -> Intervals;
}

/// The owner that an address is to have, `None` to remove it.
pub(crate) type DesiredOwner<'a> = (IpAddr, Option<&'a str>);

/// The set and its rule as one read found them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ObservedSet {
    /// A sentence for each difference, except for elements.
    pub(crate) differences: Vec<String>,
    pub(crate) elements: Elements,
}

/// The outcome of an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UpdateOutcome {
    /// The elements are as desired.
    Done {
        /// True if anything had to be written.
        changed: bool,
    },
    /// There is no set to change.
    SetMissing,
}

/// The intervals of the reconciler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Intervals {
    /// Between calls of [`SetBackend::needs_read`].
    pub(crate) check: Duration,
    /// Between reads without a reason.
    pub(crate) read: Duration,
}
