//! Lists one kind of object and watches the objects from there on.
//!
//! An ended watch resumes from its last resource version. Bookmarks keep the version recent, so that not every node
//! asks a restarted server for full lists at once. A new list is needed if the version has expired (410), an event
//! cannot be read, a watch stayed silent past its timeout, or the server's store was restored to a state before the
//! version.
//!
//! A watch from a future version is no error (Kubernetes 1.34): the watch stays silent until the store reaches the
//! version. So after a watch without events, the reflector asks the server for its current version.

mod position;

use std::{fmt, pin::pin, sync::Arc, time::Duration};

use futures_util::StreamExt as _;
use inpod_kube::with_jitter;
use inpod_types::Backoff;
use kube::{
    Api, Resource, ResourceExt as _,
    api::{ListParams, WatchEvent, WatchParams},
};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::{Cache, Stores, response_limit, retry_after::RetryAfter};
pub(super) use position::Position;

const RETRY: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(10));

/// A watch of at least this duration resets the delay.
const STABLE_AFTER: Duration = Duration::from_secs(10);

/// A watch that ends before this duration is not resumed without a delay.
const MIN_WATCH_DURATION: Duration = Duration::from_secs(1);

/// The timeout of a watch in seconds, minus a random part of up to a quarter, so that the nodes do not renew their
/// watches together. The start of the next watch is also the heartbeat by which a hanging server is noticed. The server
/// sends a bookmark every minute and shortly before the end of a watch (Kubernetes, "API Concepts").
const WATCH_SECONDS: u32 = 180;

/// A watch that outlives its timeout by this duration is dead, or a proxy withholds its events, even if the server
/// answers everything else.
const WATCH_END_TIMEOUT: Duration = Duration::from_secs(5);

/// The timeout for the check of a silent server. A hanging server is noticed within [`WATCH_SECONDS`] plus this and the
/// previous duration.
const CHECK_TIMEOUT: Duration = Duration::from_secs(10);

/// The timeout for a list or a page of a list, and for the start of a watch.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// The page of complete objects, if all of them are too large for one response.
pub(super) const PAGE_OF_OBJECTS: u32 = 100;

/// The same for metadata, which takes one to two kilobytes per object.
pub(super) const PAGE_OF_METADATA: u32 = 500;

/// By this number, pages that are too large become smaller.
const PAGE_DIVISOR: u32 = 10;

/// The cause with which the API server refuses a version above its own (apimachinery,
/// `CauseTypeResourceVersionTooLarge`).
const VERSION_TOO_LARGE: &str = "ResourceVersionTooLarge";

/// The API server reads objects with this name by their key.
const KEY_SELECTOR: &str = "metadata.name=kube-system";

pub(super) enum Update<K> {
    ListStarted,
    ListPage(Vec<K>),
    ListComplete(u64),
    /// Continues where the last watch ended.
    Resumed,
    Applied(K),
    Deleted(K),
    Lost(String),
}

#[derive(Debug)]
enum End {
    /// The watch timed out, or its connection broke. The watch resumes from its version.
    Ended,
    /// The server does not answer or refuses. The watch resumes from its version later.
    Disconnected(String),
    /// The same, because a response is larger than the client reads.
    TooLarge(String),
    /// The server no longer has the version, or cannot continue from it.
    Expired(String),
    /// The server is behind the version.
    Behind(String),
}

impl End {
    /// Classifies an error. Refusals for lack of authorization or because of load do not concern the version.
    fn of(error: &kube::Error) -> Self {
        let is_version_refused = if let kube::Error::Api(status) = error {
            !matches!(status.code, 401 | 403 | 429 | 500..)
        } else {
            matches!(error, kube::Error::SerdeError(_))
        };
        let why = inpod_kube::describe_error(error);
        if is_version_too_large(error) {
            Self::Behind(why)
        } else if is_version_refused {
            Self::Expired(why)
        } else if response_limit::is_too_large(error) {
            Self::TooLarge(why)
        } else {
            Self::Disconnected(why)
        }
    }
}

fn is_version_too_large(error: &kube::Error) -> bool {
    let kube::Error::Api(status) = error else {
        return false;
    };
    let mut causes = status.details.iter().flat_map(|details| &details.causes);
    causes.any(|cause| cause.reason == VERSION_TOO_LARGE)
}

/// Keeps a store in sync with one kind of object.
pub(super) struct Reflector<K> {
    pub(super) api: Api<K>,
    /// The objects of the same kind among which [`KEY_SELECTOR`] selects by key: those of one namespace, or all objects
    /// of a kind without namespaces.
    pub(super) keyed: Api<K>,
    /// The field selector; `None` selects all objects.
    pub(super) fields: Option<String>,
    pub(super) page: u32,
    pub(super) cache: Arc<Cache>,
    pub(super) retry_after: RetryAfter,
    pub(super) apply: fn(&mut Stores, Update<K>),
    pub(super) position: Position,
}

impl<K> Reflector<K>
where
    K: Resource + Clone + DeserializeOwned + fmt::Debug + Send + 'static,
{
    /// Lists and watches forever. The first list starts at once, since ADDs wait for it.
    pub(super) async fn run(mut self) {
        let mut failures = 0;
        loop {
            let began = Instant::now();
            let end = self.list_and_watch().await;
            let lasted = began.elapsed();
            if lasted >= STABLE_AFTER {
                failures = 0;
            }
            self.position = self.position.after(&end);
            match end {
                End::Ended if lasted >= MIN_WATCH_DURATION => continue,
                End::Ended => {}
                End::Disconnected(why)
                | End::TooLarge(why)
                | End::Expired(why)
                | End::Behind(why) => self.publish(Update::Lost(why)),
            }
            // The server's `Retry-After` comes first; the jitter spreads clients that received the same delay.
            sleep(self.retry_after.remaining() + with_jitter(RETRY.delay(failures))).await;
            failures += 1;
        }
    }

    fn publish(&self, update: Update<K>) {
        self.cache.update(|stores| (self.apply)(stores, update));
    }

    async fn list_and_watch(&mut self) -> End {
        let version = match &self.position {
            Position::At(version) => Ok(version.clone()),
            Position::Unknown | Position::Expired(_) | Position::Ahead => self.list().await,
        };
        match version {
            Ok(version) => self.watch(version).await,
            Err(end) => end,
        }
    }

    /// Returns the version of the list. A list that is too large for one response is requested again in pages, and a
    /// page with fewer objects: large annotations of a few pods must not hide the others.
    async fn list(&mut self) -> Result<String, End> {
        let mut params = ListParams {
            field_selector: self.fields.clone(),
            ..self.position.list_params()
        };
        self.publish(Update::ListStarted);
        loop {
            let page = match with_timeout(self.api.list(&params)).await {
                Err(End::TooLarge(_)) if params.limit.is_none_or(|limit| limit > 1) => {
                    params = with_smaller_pages(params, self.page);
                    continue;
                }
                page => page?,
            };
            self.publish(Update::ListPage(page.items));
            params.continue_token = page.metadata.continue_.filter(|token| !token.is_empty());
            if params.continue_token.is_none() {
                let version = page.metadata.resource_version;
                let none = || {
                    End::Expired("the API server sent a list without a resource version".to_owned())
                };
                let version = version.filter(|text| !text.is_empty()).ok_or_else(none)?;
                self.publish(Update::ListComplete(super::parse_version(Some(&version))));
                self.position = Position::At(version.clone());
                return Ok(version);
            }
        }
    }

    async fn watch(&mut self, version: String) -> End {
        let lasts = WATCH_SECONDS - fastrand::u32(..WATCH_SECONDS / 4);
        let over = Instant::now() + Duration::from_secs(lasts.into());
        let mut has_events = false;
        let params = WatchParams {
            field_selector: self.fields.clone(),
            timeout: Some(lasts),
            bookmarks: true,
            ..WatchParams::default()
        };
        let events = match with_timeout(self.api.watch(&params, &version)).await {
            Ok(events) => events,
            Err(end) => return end,
        };
        self.publish(Update::Resumed);
        let mut events = pin!(events);
        loop {
            let end = match timeout_at(over + WATCH_END_TIMEOUT, events.next()).await {
                Err(_) => self.check_silence(&version).await,
                Ok(None) if !has_events && Instant::now() >= over => {
                    self.check_rollback(&version).await.unwrap_or(End::Ended)
                }
                Ok(None) => End::Ended,
                Ok(Some(Err(error))) => End::of(&error),
                Ok(Some(Ok(event))) => match self.handle(event) {
                    Some(end) => end,
                    None => {
                        has_events = true;
                        continue;
                    }
                },
            };
            return end;
        }
    }

    /// Decides about a watch that outlived its timeout. The watch resumes after a hanging server; if the server answers
    /// everything else, events were withheld.
    async fn check_silence(&self, watched: &str) -> End {
        match self.check_rollback(watched).await {
            Some(end) => end,
            None => End::Expired("a watch stayed silent past its timeout".to_owned()),
        }
    }

    /// Checks whether the server answers, and whether its store has fallen behind the watched version. Only the version
    /// of the list matters, so the list is read by key: the watch cache walks all objects for a list with `limit=1`. The
    /// listed kind is the watched kind, because a cluster may keep each kind in an etcd with versions of its own
    /// (`--etcd-servers-overrides`).
    async fn check_rollback(&self, watched: &str) -> Option<End> {
        let by_key = ListParams::default().fields(KEY_SELECTOR);
        let page = match timeout(CHECK_TIMEOUT, self.keyed.list_metadata(&by_key)).await {
            Err(_) => {
                return Some(End::Disconnected(
                    "the API server does not answer".to_owned(),
                ));
            }
            Ok(page) => page.ok()?,
        };
        let at = page.metadata.resource_version.unwrap_or_default();
        let numbers = (at.parse::<u64>(), watched.parse::<u64>());
        let is_behind = matches!(numbers, (Ok(at), Ok(watched)) if at < watched);
        is_behind.then(|| {
            End::Behind(format!(
                "the API server is at version {at}, but sent {watched} before: its store was restored from a backup"
            ))
        })
    }

    /// Publishes an event. Returns an end for an error.
    fn handle(&mut self, event: WatchEvent<K>) -> Option<End> {
        let (version, update) = match event {
            WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                (object.resource_version(), Some(Update::Applied(object)))
            }
            WatchEvent::Deleted(object) => {
                (object.resource_version(), Some(Update::Deleted(object)))
            }
            WatchEvent::Bookmark(bookmark) => (Some(bookmark.metadata.resource_version), None),
            WatchEvent::Error(status) => {
                return Some(match End::of(&kube::Error::Api(status)) {
                    End::Behind(why) => End::Behind(why),
                    End::Ended => End::Ended,
                    End::Disconnected(why) | End::TooLarge(why) | End::Expired(why) => {
                        End::Expired(why)
                    }
                });
            }
        };
        if let Some(version) = version.filter(|text| !text.is_empty()) {
            self.position = Position::At(version);
        }
        if let Some(update) = update {
            self.publish(update);
        }
        None
    }
}

/// Reduces the pages of a list. A list in pages is always the current one: the watch cache ignores the limit of any
/// other.
fn with_smaller_pages(params: ListParams, first: u32) -> ListParams {
    let smaller = |limit: u32| (limit / PAGE_DIVISOR).max(1);
    ListParams {
        limit: Some(params.limit.map_or(first, smaller)),
        resource_version: None,
        version_match: None,
        ..params
    }
}

async fn with_timeout<T>(call: impl Future<Output = kube::Result<T>>) -> Result<T, End> {
    match timeout(REQUEST_TIMEOUT, call).await {
        Ok(answer) => answer.map_err(|error| End::of(&error)),
        Err(_) => Err(End::Disconnected(
            "the API server does not answer in time".to_owned(),
        )),
    }
}

#[cfg(test)]
mod tests;
