//! Gives existing connections time to close before they are cut.

use std::{
    thread,
    time::{Duration, Instant},
};

use inpod_linux::Netns;

use super::{
    Proxies,
    connections::{Connections, bypassing},
};

/// For existing connections when a pod is enrolled.
pub(crate) const GRACE_PERIOD: Duration = Duration::from_secs(1);

/// Doubled with each check, up to [`MAX_POLL_INTERVAL`].
const MIN_POLL_INTERVAL: Duration = Duration::from_millis(2);
const MAX_POLL_INTERVAL: Duration = Duration::from_millis(64);

/// Waits, at most [`GRACE_PERIOD`], until current connections that bypass ztunnel or a sidecar close. Ignores new
/// ones. Returns those still open; none if they cannot be listed.
pub(crate) fn await_closed(netns: &Netns, proxies: &Proxies) -> Connections {
    let deadline = Instant::now() + GRACE_PERIOD;
    let mut interval = MIN_POLL_INTERVAL;
    let mut left = bypassing(netns, proxies);
    while !matches!(&left, Ok(left) if left.is_empty()) {
        let remaining = deadline.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            break;
        }
        thread::sleep(interval.min(remaining));
        interval = MAX_POLL_INTERVAL.min(interval * 2);
        // Takes the whole period if they cannot be listed.
        left = left.and_then(|left| Ok(left.intersection(&bypassing(netns, proxies)?)));
    }
    match left {
        Ok(left) => {
            if !left.is_empty() {
                tracing::info!(
                    left = left.len(),
                    "Cutting connections that did not close within the grace period"
                );
            }
            left
        }
        Err(error) => {
            tracing::warn!(%error, "Cannot list existing connections; those still open are cut");
            Connections::default()
        }
    }
}
