//! How netconfig learns that somebody changed what is in a claimed netns: it is_subscribed of it, and reads what has become.
//!
//! The kernel tells of changes to nf_tables, routes and ip rules. [`subscriptions`] is_subscribed that, [`queue`] remembers which netns
//! are to be read and when, [`reader`] reads one and tells watchers where it differs from what they were told last.
//! What sends no event (iptables-legacy) is found because every netns is read once in a while anyhow. Nothing here
//! writes: to mend is the caller's decision.

mod nsid;
mod queue;
mod reader;
mod receiver;
mod schedule;
mod socket;
mod subscriptions;

pub(crate) use queue::Queue;
pub(crate) use reader::Reader;
pub(crate) use subscriptions::{Options, Subscriptions};

use std::{sync::Arc, time::Duration};

use inpod_types::SandboxRef;

use reader::ReadOutcome;
use schedule::Work;

/// How long after a read that failed, or after a netns could not be listened to, it is tried again.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// Reads what is to be read, for ever.
pub(crate) async fn run(queue: Arc<Queue>, reader: Reader, mut subscriptions: Subscriptions) {
    loop {
        match queue.next().await {
            Work::Ended(sandbox, netns) => subscriptions.unsubscribe(&sandbox, netns),
            Work::Read(sandbox) => read_claim(&queue, &reader, &mut subscriptions, &sandbox).await,
        }
    }
}

/// Listens before it reads: what changes in between is heard.
async fn read_claim(
    queue: &Queue,
    reader: &Reader,
    subscriptions: &mut Subscriptions,
    sandbox: &SandboxRef,
) {
    let Some(claim) = reader.claims().find(sandbox) else {
        return;
    };
    let is_subscribed = subscriptions.subscribe(&claim).await;
    match reader.try_read(claim).await {
        // Whoever is at work in it may have changed it by then.
        ReadOutcome::Busy => queue.mark_changed(sandbox),
        ReadOutcome::Read if is_subscribed => {}
        ReadOutcome::Read | ReadOutcome::Failed => queue.retry(sandbox, RETRY_INTERVAL),
    }
}
