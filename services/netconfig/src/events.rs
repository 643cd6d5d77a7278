//! How netconfig learns that somebody changed what is in a claimed netns: it hears of it, and reads what has become.
//!
//! The kernel tells of changes to nf_tables, routes and ip rules. [`ears`] hears that, [`queue`] remembers which netns
//! are to be read and when, [`reader`] reads one and tells watchers where it differs from what they were told last.
//! What sends no event (iptables-legacy) is found because every netns is read once in a while anyhow. Nothing here
//! writes: to mend is the caller's decision.

mod ears;
mod hearer;
mod number;
mod queue;
mod reader;
mod schedule;
mod socket;

pub(crate) use ears::{Ears, Options};
pub(crate) use queue::Queue;
pub(crate) use reader::Reader;

use std::{sync::Arc, time::Duration};

use inpod_types::SandboxRef;

use reader::Attempt;
use schedule::Work;

/// How long after a read that failed, or after a netns could not be listened to, it is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// Reads what is to be read, for ever.
pub(crate) async fn run(queue: Arc<Queue>, reader: Reader, mut ears: Ears) {
    loop {
        match queue.next().await {
            Work::Ended(sandbox, netns) => ears.forget(&sandbox, netns),
            Work::Read(sandbox) => attend(&queue, &reader, &mut ears, &sandbox).await,
        }
    }
}

/// Listens before it reads: what changes in between is heard.
async fn attend(queue: &Queue, reader: &Reader, ears: &mut Ears, sandbox: &SandboxRef) {
    let Some(claim) = reader.claims().find(sandbox) else {
        return;
    };
    let hears = ears.listen_to(&claim).await;
    match reader.try_read(claim).await {
        // Whoever is at work in it may have changed it by then.
        Attempt::Busy => queue.mark(sandbox),
        Attempt::Read if hears => {}
        Attempt::Read | Attempt::Failed => queue.retry(sandbox, RETRY),
    }
}
