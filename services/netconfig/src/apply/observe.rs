//! Reads a redirection without a desired state to compare.

use inpod_linux::Netns;

use super::Writer;
use crate::{backend::Backend, error::VerifyError, inspect::Proxies, plan, rules::Tag};

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
        self.with_session(netns, |session| {
            let state = self.read(session)?;
            let (tag, backend) = (state.tag(), state.backend());
            let intact = match (&tag, backend) {
                (Some(tag), Some(backend)) => plan::is_intact(&state, backend, tag.fingerprint),
                _ => false,
            };
            Ok(Observation {
                tag,
                intact,
                backend,
                proxies: session.proxies(state.our_tables()),
            })
        })
    }
}
