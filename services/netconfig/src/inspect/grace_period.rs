//! Gives connections time to end.

use std::{
    thread,
    time::{Duration, Instant},
};

use inpod_linux::Netns;

use super::{
    Proxies,
    connections::{Connections, bypassing},
};

/// How long connections from before an enrollment have to end by themselves.
pub(crate) const GRACE_PERIOD: Duration = Duration::from_secs(1);

/// Between the first two looks; it doubles, up to [`MAX_POLL_INTERVAL`].
const MIN_POLL_INTERVAL: Duration = Duration::from_millis(2);
const MAX_POLL_INTERVAL: Duration = Duration::from_millis(64);

/// Returns when every connection that goes past ztunnel or a sidecar now is over, and after [`GRACE_PERIOD`] at the latest. What begins
/// meanwhile does not count. What is left of them is given back; nothing where they cannot be seen.
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
        // What cannot be seen has all the time.
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
