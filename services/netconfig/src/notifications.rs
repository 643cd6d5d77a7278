//! Detects drift: receives the kernel's change notifications and reads each changed netns.
//!
//! The kernel reports changes of nf_tables, routes and ip rules: [`subscriptions`] receives the notifications, the
//! read queue schedules reads, [`reader`] reads and publishes changed states. Every netns is also read
//! periodically. Nothing in this module writes, because repair is the caller's decision.

mod metrics;
mod nsid;
mod reader;
mod receiver;
mod socket;
mod subscriptions;

pub(crate) use metrics::DriftMetrics;
pub(crate) use reader::Reader;
pub(crate) use subscriptions::Subscriptions;

use std::{sync::Arc, time::Duration};

use inpod_types::SandboxRef;

use crate::read_queue::{Queue, Work};
use reader::ReadOutcome;

/// The delay before another attempt after a failed read or subscription.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

pub(crate) async fn run(queue: Arc<Queue>, reader: Reader) {
    loop {
        match queue.next().await {
            Work::Ended(sandbox, netns) => reader.unsubscribe(&sandbox, netns),
            Work::Read(sandbox) => read_claim(&queue, &reader, &sandbox).await,
        }
    }
}

async fn read_claim(queue: &Queue, reader: &Reader, sandbox: &SandboxRef) {
    let Some(claim) = reader.claims().find(sandbox) else {
        return;
    };
    match reader.try_read(claim).await {
        // The lock's holder may still change the netns before releasing the lock.
        ReadOutcome::Busy => queue.mark_changed(sandbox),
        ReadOutcome::Read => {}
        ReadOutcome::Failed => queue.retry(sandbox, RETRY_INTERVAL),
    }
}
