//! Reads a pod's redirection without a desired state for comparison.

use inpod_linux::Netns;

use super::Writer;
use crate::{
    error::{Context as _, Failed},
    inspect::Proxies,
    legacy,
    netns_session::{NetnsSession, Prepared, ReachError, Visit},
    plan::{self, State},
    rules::Tag,
};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observation {
    pub tag: Option<Tag>,
    /// True if tables, routes and sysctl are exactly those belonging to the tag's fingerprint.
    pub intact: bool,
    /// True if `lo` is down and nothing is missing but what the kernel drops then.
    pub lacks_loopback: bool,
    /// True if nf_tables hold tables of inpod or rules of Istio.
    pub has_rules: bool,
    /// Users whose sockets the rules treat as the sidecar proxy's.
    pub proxies: Proxies,
    /// The UDP flows counted since the rules were written. `None` in a published state, because a count is no change of
    /// the state, and in the place of a netns that could not be read.
    pub uncaptured_udp_flows: Option<u64>,
}

impl Writer {
    pub fn observe(&self, netns: &Netns) -> Result<Observation, Failed> {
        self.with_state(netns, None, |session, state| of_state(session, &state))
    }

    /// Returns whether iptables' legacy table nat is in use while nf_tables hold no rules of inpod or Istio.
    pub(crate) fn has_only_legacy_nat(&self, netns: &Netns) -> Result<bool, Failed> {
        let uses_legacy_nat = netns.within(legacy::uses_nat).map_err(ReachError::from)?;
        Ok(uses_legacy_nat && !self.observe(netns)?.has_rules)
    }

    /// Observes a netns through the visit of a claim, and prepares the operation following the claim.
    pub(crate) fn prepare(
        &self,
        netns: &Netns,
        visit: Visit,
    ) -> Result<(Prepared, Observation), Failed> {
        let mut session = NetnsSession::new(netns, visit);
        let state = session.read().context("cannot read the rules")?;
        let observation = of_state(&mut session, &state)?;
        Ok((session.prepare(state), observation))
    }
}

pub(super) fn of_state(
    session: &mut NetnsSession<'_>,
    state: &State,
) -> Result<Observation, Failed> {
    let tag = state.tag();
    let is_intact = |tag: &Tag| plan::is_intact(state, tag.fingerprint);
    let intact = tag.as_ref().is_some_and(is_intact);
    let needs_loopback = |tag: &Tag| plan::is_intact_except_loopback(state, tag.fingerprint);
    let may_lack_loopback = !intact && tag.as_ref().is_some_and(needs_loopback);
    Ok(Observation {
        tag,
        intact,
        lacks_loopback: may_lack_loopback && !session.visit.routes.is_loopback_up()?,
        has_rules: !state.nftables.tables.is_empty() || !state.nftables.leftovers.is_empty(),
        proxies: session.proxies(state.our_tables()),
        uncaptured_udp_flows: Some(state.nftables.uncaptured_udp_flows()),
    })
}
