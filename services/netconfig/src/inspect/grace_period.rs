//! Gives existing connections time to close before new rules cut them.

use std::{
    thread,
    time::{Duration, Instant},
};

use inpod_linux::Netns;
use inpod_types::Backoff;

use super::{
    Proxies,
    connections::{Connections, bypassing},
};
use crate::inspect::InspectError;

/// The time that existing connections have to close when a pod is enrolled.
pub(crate) const GRACE_PERIOD: Duration = Duration::from_secs(1);

/// The interval doubles with each check.
const POLL_INTERVAL: Backoff = Backoff::new(Duration::from_millis(2), Duration::from_millis(64));

/// Waits, at most [`GRACE_PERIOD`], until current connections bypassing ztunnel or a sidecar close, and ignores new
/// connections.
#[derive(Debug)]
pub(crate) struct GracePeriod<'a> {
    netns: &'a Netns,
    proxies: Proxies,
    deadline: Instant,
    checks: u32,
    left: Result<Connections, InspectError>,
}

impl<'a> GracePeriod<'a> {
    pub(crate) fn begin(netns: &'a Netns, proxies: Proxies) -> Self {
        Self {
            netns,
            deadline: Instant::now() + GRACE_PERIOD,
            checks: 0,
            left: bypassing(netns, &proxies),
            proxies,
        }
    }

    /// Waits for one poll interval and returns whether the period goes on. If connections cannot be listed, the
    /// whole period passes.
    pub(crate) fn goes_on(&mut self) -> bool {
        let remaining = self.deadline.saturating_duration_since(Instant::now());
        let is_over = matches!(&self.left, Ok(left) if left.is_empty());
        if is_over || remaining.is_zero() {
            return false;
        }
        thread::sleep(POLL_INTERVAL.delay(self.checks).min(remaining));
        self.checks += 1;
        if let Ok(left) = &mut self.left {
            match bypassing(self.netns, &self.proxies) {
                Ok(now) => *left = left.intersection(&now),
                Err(error) => self.left = Err(error),
            }
        }
        true
    }

    /// Returns the connections still open, and none if connections cannot be listed.
    pub(crate) fn unclosed(self) -> Connections {
        match self.left {
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
}
