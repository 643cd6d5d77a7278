//! Programs that the API server reaches by its own address: webhooks.

use std::{path::Path, process::Command};

use super::{ADDRESS, ApiServer, enter};

impl ApiServer {
    /// A program in the server's network, with nothing of this environment.
    pub fn beside(&self, program: &Path) -> Command {
        enter(&self.netns, program)
    }

    /// The address of what runs [beside](Self::beside) the server.
    pub fn address(&self) -> &'static str {
        ADDRESS
    }
}
