//! Gives connections time to end.

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use netns::Netns;

use super::{Proxies, diag, flows, or_else, read_tables, tcp::Socket};
use crate::error::InspectError;

/// How long connections from before an enrollment have to end by themselves.
pub(crate) const SETTLING: Duration = Duration::from_secs(1);

/// Between the first two looks; it doubles, up to [`LONGEST_PAUSE`].
const PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_millis(64);

/// The ends of a connection, its own first.
type Ends = (SocketAddr, SocketAddr);

/// Returns when every connection that goes past ztunnel or a sidecar now is over, and after [`SETTLING`] at the latest. What begins
/// meanwhile does not count.
pub(crate) fn settle(netns: &Netns, proxies: &Proxies) {
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
        left = left.and_then(|left| Ok(&left & &past(netns, proxies)?));
    }
    match left {
        Ok(left) if left.is_empty() => {}
        Ok(left) => tracing::info!(left = left.len(), "Connections from before are cut"),
        Err(error) => tracing::warn!(%error, "Connections from before that are left are cut"),
    }
}

/// A kernel without sock_diag tells established ones alone.
fn past(netns: &Netns, proxies: &Proxies) -> Result<BTreeSet<Ends>, InspectError> {
    let sockets = or_else(diag::connections(netns), || {
        let sockets = read_tables(netns)?.into_iter();
        Ok(sockets.filter(flows::is_established).collect())
    })?;
    let past = sockets
        .iter()
        .filter(|socket| flows::goes_out(socket, proxies));
    let ends = past.map(|Socket { local, remote, .. }| (*local, *remote));
    Ok(ends.collect())
}
