//! What a netns bears, without anything to compare it with.

use inpod_linux::Netns;

use super::Writer;
use crate::{backend::Backend, error::VerifyError, inspect::Proxies, plan, rules::Tag};

/// What rules a netns bears.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observation {
    /// The tag of ours; `None` where there are none.
    pub tag: Option<Tag>,
    /// Whether what is there is exactly what bears the tag's fingerprint, routes and sysctl included.
    pub intact: bool,
    /// What ours are written with.
    pub backend: Option<Backend>,
    /// Whose sockets ours take for a sidecar's.
    pub proxies: Proxies,
}

impl Writer {
    /// What rules a netns bears.
    ///
    /// # Errors
    ///
    /// When it cannot be read.
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
