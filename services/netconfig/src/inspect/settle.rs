//! Gives connections time to end.

use std::{
    thread,
    time::{Duration, Instant},
};

use inpod_linux::Netns;

use super::{
    Proxies,
    connections::{Connections, past},
};

/// How long connections from before an enrollment have to end by themselves.
pub(crate) const SETTLING: Duration = Duration::from_secs(1);

/// Between the first two looks; it doubles, up to [`LONGEST_PAUSE`].
const PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_millis(64);

/// Returns when every connection that goes past ztunnel or a sidecar now is over, and after [`SETTLING`] at the latest. What begins
/// meanwhile does not count. What is left of them is given back; nothing where they cannot be seen.
pub(crate) fn settle(netns: &Netns, proxies: &Proxies) -> Connections {
    let deadline = Instant::now() + SETTLING;
    let mut pause = PAUSE;
    let mut left = past(netns, proxies);
    while !matches!(&left, Ok(left) if left.is_empty()) {
        let remaining = deadline.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            break;
        }
        thread::sleep(pause.min(remaining));
        pause = LONGEST_PAUSE.min(pause * 2);
        // What cannot be seen has all the time.
        left = left.and_then(|left| Ok(left.among(&past(netns, proxies)?)));
    }
    match left {
        Ok(left) => {
            if !left.is_empty() {
                tracing::info!(left = left.len(), "Connections from before are cut");
            }
            left
        }
        Err(error) => {
            tracing::warn!(%error, "Connections from before that are left are cut");
            Connections::default()
        }
    }
}
