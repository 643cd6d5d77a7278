//! One kind of object: listed in pages, then watched from there on, for ever.
//!
//! A watch that ends is taken up where it stood, without a list: that is what bookmarks are for, and what keeps a server
//! that was restarted from being asked for everything by every node at once. A list is made where the server has
//! forgotten that place (410), where an event cannot be read, where a watch was silent for longer than it may last, and
//! where the server's store was put back to what it was before that place. A watch from there is no error (Kubernetes
//! 1.34): it tells nothing until the store has come there again. So after one that told nothing in all its time the server
//! is asked how far it is.

use std::{fmt, pin::pin, sync::Arc, time::Duration};

use futures_util::StreamExt as _;
use kube::{
    Api, Resource, ResourceExt as _,
    api::{ListParams, WatchEvent, WatchParams},
};
use serde::de::DeserializeOwned;
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};

use super::{Known, Store, pace::Pace, pulse::Pulse};

/// Between two attempts to watch, the wait doubles from the first to the second, less up to a half by chance.
const WAITS: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(10)];

/// A watch that has held for so long begins with the shortest wait again.
const STEADY: Duration = Duration::from_secs(10);

/// A watch that the server ends sooner than this is not taken up at once.
const BRIEF: Duration = Duration::from_secs(1);

/// How long a watch lasts at most before the server ends it, in seconds, less up to a quarter by chance: the agents of
/// a cluster do not renew theirs all at once. The server sends a bookmark shortly before (Kubernetes, "API Concepts").
const WATCH_SECONDS: u32 = 60;

/// How much later than that its end may come. A watch that is silent for so long is dead, or somebody in between keeps
/// what it says: a server that answers everything else is found out within [`WATCH_SECONDS`] and this.
const LATE: Duration = Duration::from_secs(5);

/// How long the server may take for a page of a list, or to begin a watch.
const ANSWER: Duration = Duration::from_secs(30);

/// Whole objects in one page of a list: what is held of it before it is stripped.
pub(super) const PAGE_OF_OBJECTS: u32 = 100;

/// As many, where only their metadata is asked for, which is a kilobyte or two each.
pub(super) const PAGE_OF_METADATA: u32 = 500;

/// What is told of one kind of object.
pub(super) enum Told<K> {
    /// A list begins.
    Listing,
    /// The list names objects.
    Listed(Vec<K>),
    /// The list is whole, and shows what there was at this version.
    Whole(u64),
    /// A watch goes on where the last one ended.
    Resumed,
    /// An object is there, or says something else.
    Applied(K),
    /// An object is gone.
    Deleted(K),
    /// The server was lost: this is why.
    Lost(String),
}

/// Why a watch is over.
#[derive(Debug)]
enum End {
    /// Its time was over, or its connection broke: it goes on where it stood.
    Renewed,
    /// The server does not answer or refuses: it goes on where it stood.
    Lost(String),
    /// It cannot go on from where it stood.
    Forgotten(String),
}

impl End {
    /// Refusals that say nothing of the place where the watch stood: who asks may not (now), or too many ask.
    fn of(error: &kube::Error) -> Self {
        let is_of_place = if let kube::Error::Api(status) = error {
            !matches!(status.code, 401 | 403 | 429 | 500..)
        } else {
            matches!(error, kube::Error::SerdeError(_))
        };
        let why = inpod_kube::told(error);
        if is_of_place {
            Self::Forgotten(why)
        } else {
            Self::Lost(why)
        }
    }
}

/// Follows one kind of object.
pub(super) struct Follower<K> {
    pub(super) api: Api<K>,
    /// Which of them; `None` for all.
    pub(super) fields: Option<String>,
    /// How many of them one page of a list holds.
    pub(super) page: u32,
    pub(super) known: Arc<Known>,
    pub(super) pulse: Arc<Pulse>,
    pub(super) pace: Pace,
    pub(super) take: fn(&mut Store, Told<K>),
    /// How far everything is known; `None` before the first list and where another is needed.
    pub(super) version: Option<String>,
}

impl<K> Follower<K>
where
    K: Resource + Clone + DeserializeOwned + fmt::Debug + Send + 'static,
{
    /// Follows for ever. The first list is asked for at once, since an ADD waits for it.
    pub(super) async fn follow(mut self) {
        let [shortest, longest] = WAITS;
        let mut wait = shortest;
        loop {
            let began = Instant::now();
            let end = self.once().await;
            let lasted = began.elapsed();
            if lasted >= STEADY {
                wait = shortest;
            }
            match end {
                End::Renewed if lasted >= BRIEF => continue,
                End::Renewed => {}
                End::Lost(why) => self.tell(Told::Lost(why)),
                End::Forgotten(why) => {
                    self.version = None;
                    self.tell(Told::Lost(why));
                }
            }
            // What the server asks for comes first; the chance spreads those whom it asked for the same.
            sleep(self.pace.rest() + by_chance(wait)).await;
            wait = longest.min(wait * 2);
        }
    }

    fn tell(&self, told: Told<K>) {
        self.known.change(|store| (self.take)(store, told));
    }

    async fn once(&mut self) -> End {
        let version = match self.version.clone() {
            Some(version) => Ok(version),
            None => self.list().await,
        };
        match version {
            Ok(version) => self.watch(version).await,
            Err(end) => end,
        }
    }

    /// Lists everything; how far that is known then.
    async fn list(&mut self) -> Result<String, End> {
        let mut params = ListParams {
            field_selector: self.fields.clone(),
            limit: Some(self.page),
            ..ListParams::default()
        };
        self.tell(Told::Listing);
        loop {
            let page = answered(self.api.list(&params)).await?;
            self.pulse.hear();
            self.tell(Told::Listed(page.items));
            params.continue_token = page.metadata.continue_.filter(|token| !token.is_empty());
            if params.continue_token.is_none() {
                let version = page.metadata.resource_version;
                let none = || End::Forgotten("the API server gives a list no version".to_owned());
                let version = version.filter(|text| !text.is_empty()).ok_or_else(none)?;
                self.tell(Told::Whole(super::version(Some(&version))));
                self.version = Some(version.clone());
                return Ok(version);
            }
        }
    }

    async fn watch(&mut self, version: String) -> End {
        let mut silences = self.pulse.silences();
        let lasts = WATCH_SECONDS - fastrand::u32(..WATCH_SECONDS / 4);
        let over = Instant::now() + Duration::from_secs(lasts.into());
        let mut has_told = false;
        let params = WatchParams {
            field_selector: self.fields.clone(),
            timeout: Some(lasts),
            bookmarks: true,
            ..WatchParams::default()
        };
        let events = match answered(self.api.watch(&params, &version)).await {
            Ok(events) => events,
            Err(end) => return end,
        };
        self.tell(Told::Resumed);
        let quiet = Duration::from_secs(lasts.into()) + LATE;
        let mut events = pin!(events);
        loop {
            self.pulse.hear();
            let event = tokio::select! {
                event = timeout(quiet, events.next()) => event,
                why = silence(&mut silences) => return End::Lost(why),
            };
            let end = match event {
                Err(_) => {
                    End::Forgotten("a watch was silent for longer than it may last".to_owned())
                }
                Ok(None) if !has_told && Instant::now() >= over => {
                    self.whether_put_back(&version).await
                }
                Ok(None) => End::Renewed,
                Ok(Some(Err(error))) => End::of(&error),
                Ok(Some(Ok(event))) => match self.take(event) {
                    Some(end) => end,
                    None => {
                        has_told = true;
                        continue;
                    }
                },
            };
            return end;
        }
    }

    /// Whether the server's store is still at a watch's place or beyond. One object of all is listed, of any node: with
    /// it comes the version, and a server that looks for one node's pods would look through many.
    async fn whether_put_back(&self, place: &str) -> End {
        let any = ListParams::default().limit(1);
        let Ok(page) = answered(self.api.list_metadata(&any)).await else {
            return End::Renewed;
        };
        let at = page.metadata.resource_version.unwrap_or_default();
        let numbers = (at.parse::<u64>(), place.parse::<u64>());
        if matches!(numbers, (Ok(at), Ok(place)) if at < place) {
            return End::Forgotten(format!(
                "the API server is at version {at}, and told of {place} before: its store was put back"
            ));
        }
        End::Renewed
    }

    /// Takes an event in, unless that is the end.
    fn take(&mut self, event: WatchEvent<K>) -> Option<End> {
        let (version, told) = match event {
            WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                (object.resource_version(), Some(Told::Applied(object)))
            }
            WatchEvent::Deleted(object) => (object.resource_version(), Some(Told::Deleted(object))),
            WatchEvent::Bookmark(bookmark) => (Some(bookmark.metadata.resource_version), None),
            WatchEvent::Error(status) => {
                return Some(End::Forgotten(inpod_kube::told(&kube::Error::Api(status))));
            }
        };
        // Where an object is without one, the place stays as it was.
        let version = version.filter(|text| !text.is_empty());
        if version.is_some() {
            self.version = version;
        }
        if let Some(told) = told {
            self.tell(told);
        }
        None
    }
}

/// Waits until the server was found to be silent, for ever where nobody looks.
async fn silence(silences: &mut watch::Receiver<String>) -> String {
    match silences.changed().await {
        Ok(()) => silences.borrow_and_update().clone(),
        Err(_) => std::future::pending().await,
    }
}

async fn answered<T>(call: impl Future<Output = kube::Result<T>>) -> Result<T, End> {
    match timeout(ANSWER, call).await {
        Ok(answer) => answer.map_err(|error| End::of(&error)),
        Err(_) => Err(End::Lost(
            "the API server does not answer in time".to_owned(),
        )),
    }
}

/// Between a half and the whole of a wait: the agents of a cluster that lost one server do not come back at once.
fn by_chance(wait: Duration) -> Duration {
    wait / 2 + (wait / 2).mul_f64(fastrand::f64())
}

#[cfg(test)]
mod tests;
