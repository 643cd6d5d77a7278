//! Ends claims whose netns is gone: a held descriptor keeps a dead pod's network, and the host side of its veth,
//! alive (services/docs/facts/kernel.md, 7). A name that goes is seen at once; what is not seen, a process that ends after that for
//! example, is found by looking through all claims every so often.

use std::{path::PathBuf, sync::Arc, time::Duration};

use tokio::{
    sync::broadcast::error::RecvError,
    task::spawn_blocking,
    time::{MissedTickBehavior, interval},
};

use super::{
    Claim, Claims, Event, is_gone,
    paths::{Paths, Sight},
};

/// Watches the names of claimed netns, and looks through the claims every so often, for ever.
pub(crate) async fn run(claims: Arc<Claims>, every: Duration) {
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (_, mut events) = claims.subscribe();
    let mut watch = Watch {
        claims,
        paths: None,
    };
    loop {
        let seen = tokio::select! {
            _ = ticks.tick() => Sight::Lost,
            seen = watch.next() => seen,
            event = events.recv() => watch.follow(event),
        };
        match seen {
            Sight::Nothing => {}
            Sight::Gone(names) => watch.look_at(&names),
            Sight::Lost => {
                watch.cover_all();
                sweep_all(&watch.claims).await;
            }
        }
    }
}

async fn sweep_all(claims: &Arc<Claims>) {
    let claims = Arc::clone(claims);
    if let Err(error) = spawn_blocking(move || sweep(&claims)).await {
        tracing::error!(%error, "A sweep of the claims failed");
    }
}

/// Looks through the claims once.
fn sweep(claims: &Claims) {
    for claim in claims.list() {
        // Whoever is at work on it finds out by himself.
        if let Ok(_turn) = claim.turn.try_lock() {
            release_if_gone(claims, &claim);
        }
    }
}

/// As it is held by now: it may have been confirmed at another path since it was looked up.
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

/// The names of claimed netns that are watched.
struct Watch {
    claims: Arc<Claims>,
    /// `None` where the kernel gives none: there is a bound per user (fs.inotify.max_user_instances).
    paths: Option<Paths>,
}

impl Watch {
    async fn next(&mut self) -> Sight {
        let Some(paths) = &mut self.paths else {
            return std::future::pending().await;
        };
        paths.next().await.unwrap_or_else(|error| {
            tracing::warn!(%error, "Cannot watch directories any more");
            self.paths = None;
            Sight::Lost
        })
    }

    /// A claim is at a name that is new.
    fn follow(&mut self, event: Result<Event, RecvError>) -> Sight {
        match event {
            Ok(Event::Placed(sandbox)) => {
                if let Some(claim) = self.claims.find(&sandbox) {
                    self.cover(&claim);
                    // It may have gone before it was watched.
                    if !claim.netns.path_intact() {
                        self.let_go(claim);
                    }
                }
                Sight::Nothing
            }
            Err(RecvError::Lagged(_)) => Sight::Lost,
            // It is closed when the claims are dropped, which this holds.
            Ok(Event::State(_) | Event::Released(_)) | Err(RecvError::Closed) => Sight::Nothing,
        }
    }

    fn cover_all(&mut self) {
        if self.paths.is_none() {
            let opened = Paths::open();
            let opened =
                opened.inspect_err(|error| tracing::warn!(%error, "Cannot watch directories"));
            self.paths = opened.ok();
        }
        for claim in self.claims.list() {
            self.cover(&claim);
        }
    }

    fn cover(&mut self, claim: &Claim) {
        let path = claim.netns.path();
        if let Some(Err(error)) = self.paths.as_mut().map(|paths| paths.watch(path)) {
            tracing::debug!(path = %path.display(), %error, "Cannot watch the directory of a netns");
        }
    }

    fn look_at(&self, names: &[PathBuf]) {
        let mut claims = self.claims.list();
        claims.retain(|claim| names.iter().any(|name| name == claim.netns.path()));
        claims.into_iter().for_each(|claim| self.let_go(claim));
    }

    /// When whoever is at work in the netns is done.
    fn let_go(&self, claim: Arc<Claim>) {
        let claims = Arc::clone(&self.claims);
        tokio::spawn(async move {
            let turn = Arc::clone(&claim.turn).lock_owned().await;
            let looked = spawn_blocking(move || {
                release_if_gone(&claims, &claim);
                drop(turn);
            });
            if let Err(error) = looked.await {
                tracing::error!(%error, "A look at a claim failed");
            }
        });
    }
}
