//! Reads a redirection without a desired state to compare.

use inpod_linux::Netns;

use super::Writer;
use crate::{
    backend::Backend,
    error::VerifyError,
    inspect::Proxies,
    netns_session::{NetnsSession, Prepared, Visit},
    plan::{self, State},
    rules::Tag,
};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observation {
    pub tag: Option<Tag>,
    /// Tables, routes and sysctl are exactly those of the tag's fingerprint.
    pub intact: bool,
    pub backend: Option<Backend>,
    /// Users whose sockets the rules treat as the sidecar's.
    pub proxies: Proxies,
}

impl Writer {
    pub fn observe(&self, netns: &Netns) -> Result<Observation, VerifyError> {
        self.with_state(netns, None, |session, state| Ok(of_state(session, &state)))
    }

    /// Observes a netns through the visit of a claim, and prepares the operation that follows.
    pub(crate) fn prepare(
        &self,
        netns: &Netns,
        visit: Visit,
    ) -> Result<(Prepared, Observation), VerifyError> {
        let mut session = NetnsSession::new(netns, &self.programs, visit);
        let state = self.read(&mut session)?;
        let observation = of_state(&session, &state);
        Ok((session.prepare(state), observation))
    }
}

fn of_state(session: &NetnsSession<'_>, state: &State) -> Observation {
    let (tag, backend) = (state.tag(), state.backend());
    let intact = match (&tag, backend) {
        (Some(tag), Some(backend)) => plan::is_intact(state, backend, tag.fingerprint),
        _ => false,
    };
    Observation {
        tag,
        intact,
        backend,
        proxies: session.proxies(state.our_tables()),
    }
}
