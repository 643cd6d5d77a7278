//! Prepares a claimed netns for the operation that follows, while the caller has ztunnel open its listeners.

use inpod_linux::Netns;

use super::{Observation, Writer, observe::of_state, undo::Undo};
use crate::{
    error::{Context as _, Failed, KernelError},
    netns_session::{NetnsSession, Prepared, Visit},
    plan::State,
    rules::Redirection,
};

impl Writer {
    /// Observes a netns through the visit of a claim, and adds the routing that an announced redirection needs.
    pub(crate) fn prepare(
        &self,
        netns: &Netns,
        visit: Visit,
        announced: Option<&Redirection>,
    ) -> Result<(Prepared, Observation), Failed> {
        let mut session = NetnsSession::new(netns, visit);
        let mut state = session.read().context("cannot read the rules")?;
        if let Some(redirection) = announced {
            self.prepare_routing(&mut session, &mut state, redirection);
        }
        let observation = of_state(&mut session, &state)?;
        Ok((session.prepare(state), observation))
    }

    /// Adds missing routes and ip rules, which take no packet before rules mark one. Leaves a netns alone that has rules
    /// or had connections. A failure only undoes what was added: apply adds it then, and reports why it cannot.
    fn prepare_routing(
        &self,
        session: &mut NetnsSession<'_>,
        state: &mut State,
        redirection: &Redirection,
    ) {
        let has_rules = !state.nftables.tables.is_empty() || !state.nftables.leftovers.is_empty();
        if has_rules || state.has_connected {
            return;
        }
        let Ok(plan) = self.plan_for(session, redirection) else {
            return;
        };
        let missing = plan.routing_additions(state);
        if missing.is_empty() || plan.needs_address() {
            return;
        }
        let mut undo = Undo::new(state.clone());
        // Routing that this process has read back before needs no second comparison, unless an item existed already.
        let is_known = self.read_back.knows(plan.fingerprint);
        let mut expected = is_known.then(|| state.routing.clone());
        let add_all = || {
            for item in &missing {
                let is_new = session.visit.routes.add(item)?;
                undo.record(item);
                expected = expected.take().filter(|_| is_new).map(|it| it.with(item));
            }
            expected.map_or_else(|| session.visit.routes.read(), Ok)
        };
        match add_all() {
            Ok(routing) => state.routing = routing,
            Err(error) => abandon(session, &undo, &error),
        }
    }
}

fn abandon(session: &mut NetnsSession<'_>, undo: &Undo, error: &KernelError) {
    let undo_failures = undo.run(session);
    tracing::debug!(%error, ?undo_failures, "Cannot prepare the routing of a pod");
}
