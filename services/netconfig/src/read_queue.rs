//! Queues pending reads, which the receivers add and the reader takes.

mod schedule;

use std::{
    collections::hash_map::RandomState,
    hash::BuildHasher as _,
    time::{Duration, Instant},
};

use inpod_types::{NetnsId, SandboxRef};
use parking_lot::Mutex;
use tokio::sync::Notify;

use schedule::Schedule;
pub(crate) use schedule::Work;

#[derive(Debug)]
pub(crate) struct Queue {
    schedule: Mutex<Schedule>,
    wakeup: Notify,
    random: RandomState,
}

impl Queue {
    /// Creates a queue that reads each netns every `period` even without a notification, and less often if there
    /// are many claims.
    pub(crate) fn new(period: Duration) -> Self {
        Self {
            schedule: Mutex::new(Schedule::new(period)),
            wakeup: Notify::new(),
            random: RandomState::new(),
        }
    }

    pub(crate) fn add(&self, sandbox: &SandboxRef) {
        let now = Instant::now();
        // A random phase spreads periodic reads, so that claims made together are not always read together.
        let phase = self.random.hash_one((sandbox, now)) % 1000;
        let phase = u32::try_from(phase).unwrap_or_default();
        self.schedule.lock().add(sandbox.clone(), phase, now);
        self.wakeup.notify_one();
    }

    pub(crate) fn remove(&self, sandbox: &SandboxRef, netns: NetnsId) {
        self.schedule.lock().remove(sandbox, netns);
        self.wakeup.notify_one();
    }

    pub(crate) fn mark_changed(&self, sandbox: &SandboxRef) {
        let is_sooner = self.schedule.lock().mark_changed(sandbox, Instant::now());
        if is_sooner {
            self.wakeup.notify_one();
        }
    }

    /// Cancels reads requested before a read that began at `started`.
    pub(crate) fn mark_read(&self, sandbox: &SandboxRef, started: Instant) {
        self.schedule.lock().mark_read(sandbox, started);
    }

    /// Returns whether the netns was read and, as far as is known, has not changed since.
    pub(super) fn is_read(&self, sandbox: &SandboxRef) -> bool {
        self.schedule.lock().is_read(sandbox)
    }

    pub(crate) fn mark_all_changed(&self) {
        self.schedule.lock().mark_all_changed(Instant::now());
        self.wakeup.notify_one();
    }

    pub(super) fn retry(&self, sandbox: &SandboxRef, after: Duration) {
        let now = Instant::now();
        let is_sooner = self.schedule.lock().request_read(sandbox, now + after, now);
        if is_sooner {
            self.wakeup.notify_one();
        }
    }

    pub(super) async fn next(&self) -> Work {
        loop {
            let (work, next) = {
                let mut schedule = self.schedule.lock();
                (schedule.pop_due(Instant::now()), schedule.next_due_at())
            };
            if let Some(work) = work {
                return work;
            }
            tokio::select! {
                () = self.wakeup.notified() => {}
                () = sleep_until(next) => {}
            }
        }
    }
}

async fn sleep_until(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time.into()).await,
        None => std::future::pending().await,
    }
}
