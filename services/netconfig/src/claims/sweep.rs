//! Ends claims whose netns is gone: a held descriptor keeps a dead pod's network, and the host side of its veth,
//! alive (kernel-facts.md, 7).

use std::{sync::Arc, time::Duration};

use tokio::time::{MissedTickBehavior, interval};

use super::{Claims, is_gone};

/// Looks through the claims every so often, for ever.
pub(crate) async fn run(claims: Arc<Claims>, every: Duration) {
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let claims = Arc::clone(&claims);
        let swept = tokio::task::spawn_blocking(move || sweep(&claims));
        if let Err(error) = swept.await {
            tracing::error!(%error, "A sweep of the claims failed");
        }
    }
}

/// Looks through the claims once.
pub(crate) fn sweep(claims: &Claims) {
    for claim in claims.list() {
        // Whoever is at work on it finds out by himself.
        let Ok(_turn) = claim.turn.try_lock() else {
            continue;
        };
        if is_gone(&claim) && claims.release(&claim) {
            let path = claim.netns.path().display();
            tracing::info!(sandbox = %claim.sandbox, %path, "Released a claim whose netns is gone");
        }
    }
}
