//! Ends claims whose netns is gone: a held descriptor keeps a dead pod's network alive, with the host side of its
//! veth (services/docs/facts/kernel.md, 7). inotify reports a removed path at once, and a periodic sweep finds the
//! remaining cases, such as a process ending later; only some sweeps check all claims.

use std::{path::PathBuf, sync::Arc, time::Duration};

use tokio::{
    sync::broadcast::error::RecvError,
    task::spawn_blocking,
    time::{MissedTickBehavior, interval},
};

use super::{
    Claim, Claims, Event, is_gone,
    path_watcher::{PathEvent, PathWatcher},
};

/// The number of sweeps per check of all claims, which is rare because each check is a system call.
const SWEEPS_PER_FULL_SWEEP: u32 = 12;

pub(crate) async fn run(claims: Arc<Claims>, every: Duration) {
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (_, mut events) = claims.subscribe();
    let mut sweeper = Sweeper {
        claims,
        path_watcher: None,
    };
    let mut until_full = 0;
    loop {
        let seen = tokio::select! {
            _ = ticks.tick() => {
                if until_full > 0 {
                    until_full -= 1;
                    sweep_all(&sweeper.claims, false).await;
                    continue;
                }
                until_full = SWEEPS_PER_FULL_SWEEP - 1;
                PathEvent::Lost
            }
            seen = sweeper.next() => seen,
            event = events.recv() => sweeper.handle_claim_event(event),
        };
        match seen {
            PathEvent::Irrelevant => {}
            PathEvent::Removed(names) => sweeper.check_names(&names),
            PathEvent::Lost => {
                sweeper.watch_all();
                sweep_all(&sweeper.claims, true).await;
            }
        }
    }
}

async fn sweep_all(claims: &Arc<Claims>, is_full: bool) {
    let mut claims_to_check = claims.list();
    claims_to_check.retain(|claim| {
        claim.drop_stale();
        is_full || claim.ends_unnoticed()
    });
    if claims_to_check.is_empty() {
        return;
    }
    let claims = Arc::clone(claims);
    if let Err(error) = spawn_blocking(move || sweep(&claims, &claims_to_check)).await {
        tracing::error!(%error, "The sweep of the claims failed");
    }
}

fn sweep(claims: &Claims, claims_to_check: &[Arc<Claim>]) {
    for claim in claims_to_check {
        // If another operation holds the lock, its holder finds out by itself.
        if let Ok(_turn) = claim.change_lock.try_lock() {
            release_if_gone(claims, claim);
        }
    }
}

/// Releases a claim whose netns is gone, after another lookup, because a call may have confirmed the claim at
/// another path meanwhile.
fn release_if_gone(claims: &Claims, claim: &Claim) {
    let found = claims.find(&claim.sandbox);
    let Some(claim) = found.filter(|found| found.netns.same_as(&claim.netns)) else {
        return;
    };
    if is_gone(&claim) && claims.release(&claim) {
        let path = claim.netns.path().display();
        tracing::info!(sandbox = %claim.sandbox, %path, "Released a claim whose netns is gone");
    }
}

struct Sweeper {
    claims: Arc<Claims>,
    /// `None` if the kernel refuses another inotify instance (fs.inotify.max_user_instances).
    path_watcher: Option<PathWatcher>,
}

impl Sweeper {
    async fn next(&mut self) -> PathEvent {
        let Some(path_watcher) = &mut self.path_watcher else {
            return std::future::pending().await;
        };
        path_watcher.next().await.unwrap_or_else(|error| {
            tracing::warn!(%error, "Cannot watch directories any more");
            self.path_watcher = None;
            PathEvent::Lost
        })
    }

    fn handle_claim_event(&mut self, event: Result<Event, RecvError>) -> PathEvent {
        match event {
            Ok(Event::Claimed(sandbox)) => {
                if let Some(claim) = self.claims.find(&sandbox) {
                    self.watch_path(&claim);
                    // The path may have been removed before the watch was added.
                    if !claim.netns.path_intact() {
                        self.release_when_idle(claim);
                    }
                }
                PathEvent::Irrelevant
            }
            Err(RecvError::Lagged(_)) => PathEvent::Lost,
            // `Closed` is impossible, because `self.claims` owns the sender.
            Ok(Event::State(_) | Event::Released(_)) | Err(RecvError::Closed) => {
                PathEvent::Irrelevant
            }
        }
    }

    fn watch_all(&mut self) {
        if self.path_watcher.is_none() {
            let opened = PathWatcher::open();
            let opened =
                opened.inspect_err(|error| tracing::warn!(%error, "Cannot watch directories"));
            self.path_watcher = opened.ok();
        }
        for claim in self.claims.list() {
            self.watch_path(&claim);
        }
    }

    fn watch_path(&mut self, claim: &Claim) {
        let path = claim.netns.path();
        if let Some(Err(error)) = self
            .path_watcher
            .as_mut()
            .map(|path_watcher| path_watcher.watch(path))
        {
            tracing::debug!(path = %path.display(), %error, "Cannot watch the directory of a netns");
        }
    }

    fn check_names(&self, names: &[PathBuf]) {
        let mut claims = self.claims.list();
        claims.retain(|claim| names.iter().any(|name| name == claim.netns.path()));
        claims
            .into_iter()
            .for_each(|claim| self.release_when_idle(claim));
    }

    /// Releases a claim whose netns is gone, once no operation in the netns holds the lock.
    fn release_when_idle(&self, claim: Arc<Claim>) {
        let claims = Arc::clone(&self.claims);
        tokio::spawn(async move {
            let change_lock = Arc::clone(&claim.change_lock).lock_owned().await;
            let checked = spawn_blocking(move || {
                release_if_gone(&claims, &claim);
                drop(change_lock);
            });
            if let Err(error) = checked.await {
                tracing::error!(%error, "The check of a claim failed");
            }
        });
    }
}
