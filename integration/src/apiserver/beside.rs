//! Starts webhooks, which the API server reaches at its own address.

use std::{path::Path, process::Command};

use super::{ADDRESS, ApiServer, enter};

impl ApiServer {
    pub fn beside(&self, program: &Path) -> Command {
        enter(&self.netns, program)
    }

    pub fn address(&self) -> &'static str {
        ADDRESS
    }
}
