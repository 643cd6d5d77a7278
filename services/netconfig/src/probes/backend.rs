//! What holds the probe set: nf_tables, or ipset and a rule of iptables. Each takes and gives plain data.

use std::{fmt, net::IpAddr, time::Duration};

use super::{ProbeSetError, refcount::Elements, selector::Selected, settings::ProbeSettings};
use crate::family::Family;

/// See the module.
pub(crate) trait SetBackend: fmt::Debug + Send {
    /// Which addresses it can hold; others are passed over.
    fn families(&self) -> &'static [Family];

    /// What is there. `None` where nothing of ours is.
    fn read(
        &mut self,
        selected: &Selected,
        settings: &ProbeSettings,
    ) -> Result<Option<ObservedSet>, ProbeSetError>;

    /// Makes all of it so, without a moment in which an element or the rule that was there is not.
    fn write(
        &mut self,
        selected: &Selected,
        settings: &ProbeSettings,
        elements: &Elements,
    ) -> Result<(), ProbeSetError>;

    /// Adds elements that nobody is known to have added. `None` where one of them is there all the same; nothing was
    /// added then.
    fn add(
        &mut self,
        requester: &str,
        addresses: &[IpAddr],
    ) -> Result<Option<UpdateOutcome>, ProbeSetError>;

    /// Changes single elements on behalf of one owner.
    fn update_owners(
        &mut self,
        requester: &str,
        desired: &[DesiredOwner<'_>],
    ) -> Result<UpdateOutcome, ProbeSetError>;

    /// Takes all of it away, the rule first, and reads back that nothing is left. Whether anything was there.
    fn clear(&mut self) -> Result<bool, ProbeSetError>;

    /// Whether there is reason to read all of it. Takes microseconds.
    fn needs_read(&mut self, elements: &Elements) -> bool;

    /// Whether a change of a table of nf_tables may concern it: its family (NFPROTO of linux/netfilter.h) and name, and
    /// the port of the socket that made it.
    fn is_relevant(&self, family: u8, table: &str, port: u32) -> bool;

    /// How often it is asked [`Self::needs_read`], and after how long all of it is read without a reason, if that
    /// read_duration so long the last time.
    fn intervals(&self, read_duration: Duration) -> Intervals;
}

/// What an address is to be: one owner's, or nobody's.
pub(crate) type DesiredOwner<'a> = (IpAddr, Option<&'a str>);

/// What was read together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ObservedSet {
    /// What is not as it should be, but for elements: a describe_element each.
    pub(crate) differences: Vec<String>,
    /// The elements.
    pub(crate) elements: Elements,
}

/// What became of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UpdateOutcome {
    /// It is so; whether anything had to be written for it.
    Done {
        /// See above.
        changed: bool,
    },
    /// There is no set to change.
    SetMissing,
}

/// How often something is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Intervals {
    /// Without reading it.
    pub(crate) check: Duration,
    /// Reading it.
    pub(crate) read: Duration,
}
