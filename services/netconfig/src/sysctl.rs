//! The one sysctl of a pod that inpod sets.

use std::{fs, io};

/// Connections that wait to be accepted are given to another listener of the port when theirs closes, which is what
/// a ztunnel that takes over from another one needs: 88 of 200 were reset without it (kernel-facts.md, 6). Since Linux
/// 5.14. Of the netns of whichever thread opens it.
const TCP_MIGRATE_REQ: &str = "/proc/sys/net/ipv4/tcp_migrate_req";

/// Whether it is on. `None` where the kernel does not have it.
pub(crate) fn migrates() -> io::Result<Option<bool>> {
    match fs::read_to_string(TCP_MIGRATE_REQ) {
        Ok(text) => Ok(Some(text.trim() != "0")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Switches it.
pub(crate) fn set_migrates(on: bool) -> io::Result<()> {
    fs::write(TCP_MIGRATE_REQ, if on { "1" } else { "0" })
}
