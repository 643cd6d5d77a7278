//! Programs that the API server reaches at its own address: webhooks.

use std::{path::Path, process::Command};

use super::{ADDRESS, ApiServer, enter};

impl ApiServer {
    /// Returns a command in the server's network, with an empty environment.
    pub fn beside(&self, program: &Path) -> Command {
        enter(&self.netns, program)
    }

    /// Returns the address of programs that run [beside](Self::beside) the server.
    pub fn address(&self) -> &'static str {
        ADDRESS
    }
}
