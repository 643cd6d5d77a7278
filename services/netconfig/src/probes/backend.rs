//! Backends of the probe set: nf_tables, or ipset with an iptables rule.

use std::{fmt, net::IpAddr, time::Duration};

use super::{ProbeSetError, refcount::Elements, selector::Selected, settings::ProbeSettings};
use crate::family::Family;

pub(crate) trait SetBackend: fmt::Debug + Send {
    /// Addresses of other families are ignored.
    fn families(&self) -> &'static [Family];

    /// Returns `None` if there is no set of ours.
    fn read(
        &mut self,
        selected: &Selected,
        settings: &ProbeSettings,
    ) -> Result<Option<ObservedSet>, ProbeSetError>;

    /// Writes everything. Elements and rules that stay are never absent.
    fn write(
        &mut self,
        selected: &Selected,
        settings: &ProbeSettings,
        elements: &Elements,
    ) -> Result<(), ProbeSetError>;

    /// Adds elements believed to be new. `None`, and nothing added, if one exists.
    fn add(
        &mut self,
        requester: &str,
        addresses: &[IpAddr],
    ) -> Result<Option<UpdateOutcome>, ProbeSetError>;

    fn update_owners(
        &mut self,
        requester: &str,
        desired: &[DesiredOwner<'_>],
    ) -> Result<UpdateOutcome, ProbeSetError>;

    /// Removes everything, the rule first, and verifies that. Returns whether there was anything.
    fn clear(&mut self) -> Result<bool, ProbeSetError>;

    /// Returns whether there are signs of a change, in microseconds.
    fn needs_read(&mut self, elements: &Elements) -> bool;

    /// Returns whether a change of an nf_tables table may concern the set: family (NFPROTO of linux/netfilter.h),
    /// name, and netlink port of the socket that changed it.
    fn is_relevant(&self, family: u8, table: &str, port: u32) -> bool;

    /// Returns those of [`Self::needs_read`] and of unconditional reads.
    fn intervals(&self, read_duration: Duration) -> Intervals;
}

/// `None` to remove the address.
pub(crate) type DesiredOwner<'a> = (IpAddr, Option<&'a str>);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ObservedSet {
    /// One sentence each; without elements.
    pub(crate) differences: Vec<String>,
    pub(crate) elements: Elements,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UpdateOutcome {
    /// The elements are as desired.
    Done {
        changed: bool,
    },
    SetMissing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Intervals {
    /// Between calls of [`SetBackend::needs_read`].
    pub(crate) check: Duration,
    /// Between reads without a reason.
    pub(crate) read: Duration,
}
