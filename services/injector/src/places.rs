//! Places of connections: there are so many, and where all are taken the connection that has been idle for longest makes
//! room. An API server keeps its connections for the next review; others that keep theirs are not to keep it out.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use prometheus_client::metrics::counter::Counter;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// All places.
#[derive(Debug)]
pub(crate) struct Places {
    free: Arc<Semaphore>,
    most: usize,
    idle: Mutex<Idle>,
    /// Wakes who waits for a place when a connection has become idle.
    more: Notify,
    evictions: Counter,
}

/// Connections that wait for a request, by the order in which they came to wait.
#[derive(Debug, Default)]
struct Idle {
    last: u64,
    waiting: BTreeMap<u64, Arc<Notify>>,
}

/// One connection's place; free again with the value.
#[derive(Debug)]
pub(crate) struct Place {
    places: Arc<Places>,
    /// Since when it is idle; `None`: a request is worked on.
    since: Mutex<Option<u64>>,
    leave: Arc<Notify>,
    _permit: OwnedSemaphorePermit,
}

/// A request is worked on as long as the value is there.
#[derive(Debug)]
pub(crate) struct Busy(Arc<Place>);

impl Places {
    /// So many places; how many connections had to make room is counted.
    pub(crate) fn new(most: usize, evictions: Counter) -> Arc<Self> {
        Arc::new(Self {
            free: Arc::new(Semaphore::new(most)),
            most,
            idle: Mutex::default(),
            more: Notify::new(),
            evictions,
        })
    }

    /// A place, for a connection that is idle until its first request. Where none is free the idlest connection is asked to
    /// leave; where none is idle, the first that becomes so.
    pub(crate) async fn take(self: &Arc<Self>) -> Arc<Place> {
        loop {
            let is_to_come = self.free.available_permits() > 0 || self.evict();
            tokio::select! {
                () = self.more.notified(), if !is_to_come => {}
                // Never closed, hence never an error.
                permit = Arc::clone(&self.free).acquire_owned() => {
                    if let Ok(permit) = permit {
                        return Place::new(self, permit);
                    }
                }
            }
        }
    }

    /// Returns when no connection is left.
    pub(crate) async fn emptied(&self) {
        let all = u32::try_from(self.most).unwrap_or(u32::MAX);
        drop(self.free.acquire_many(all).await);
    }

    fn idle(&self) -> MutexGuard<'_, Idle> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn evict(&self) -> bool {
        let idlest = self.idle().waiting.pop_first();
        if let Some((_, leave)) = &idlest {
            self.evictions.inc();
            leave.notify_one();
        }
        idlest.is_some()
    }
}

impl Place {
    fn new(places: &Arc<Places>, permit: OwnedSemaphorePermit) -> Arc<Self> {
        let place = Arc::new(Self {
            places: Arc::clone(places),
            since: Mutex::default(),
            leave: Arc::default(),
            _permit: permit,
        });
        place.idle();
        place
    }

    fn since(&self) -> MutexGuard<'_, Option<u64>> {
        self.since.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn idle(&self) {
        let mut idle = self.places.idle();
        idle.last += 1;
        let last = idle.last;
        idle.waiting.insert(last, Arc::clone(&self.leave));
        drop(idle);
        *self.since() = Some(last);
        self.places.more.notify_one();
    }

    fn not_idle(&self) {
        if let Some(since) = self.since().take() {
            drop(self.places.idle().waiting.remove(&since));
        }
    }

    /// A request is worked on from now on.
    pub(crate) fn busy(self: &Arc<Self>) -> Busy {
        self.not_idle();
        Busy(Arc::clone(self))
    }

    /// Whether a request is worked on.
    pub(crate) fn is_busy(&self) -> bool {
        self.since().is_none()
    }

    /// Returns when the connection is to make room.
    pub(crate) async fn asked_to_leave(&self) {
        self.leave.notified().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.not_idle();
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.idle();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    const SOON: Duration = Duration::from_secs(10);
    const A_WHILE: Duration = Duration::from_millis(50);

    /// What a connection does: it holds its place until it is asked to leave.
    fn held(place: Arc<Place>) -> tokio::task::JoinHandle<()> {
        tokio::spawn(async move {
            place.asked_to_leave().await;
            drop(place);
        })
    }

    async fn take(places: &Arc<Places>) -> Arc<Place> {
        timeout(SOON, places.take()).await.unwrap()
    }

    #[tokio::test]
    async fn the_idlest_makes_room_and_no_other() {
        let evictions = Counter::default();
        let places = Places::new(2, evictions.clone());
        let (first, second) = (take(&places).await, take(&places).await);
        // The first one has had a request since the second one came.
        drop(first.busy());
        let (first, second) = (held(first), held(second));
        let _third = take(&places).await;
        second.await.unwrap();
        assert!(!first.is_finished());
        assert_eq!(evictions.get(), 1);
    }

    #[tokio::test]
    async fn one_that_is_worked_for_never_makes_room_until_it_is_idle() {
        let places = Places::new(1, Counter::default());
        let first = take(&places).await;
        let busy = first.busy();
        assert!(first.is_busy());
        let first = held(first);
        assert!(timeout(A_WHILE, places.take()).await.is_err());
        let next = tokio::spawn({
            let places = Arc::clone(&places);
            async move { places.take().await }
        });
        drop(busy);
        timeout(SOON, first).await.unwrap().unwrap();
        timeout(SOON, next).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_place_that_is_given_back_is_there_for_the_next_and_in_the_end_all_are() {
        let places = Places::new(1, Counter::default());
        let first = take(&places).await;
        let busy = first.busy();
        let next = tokio::spawn({
            let places = Arc::clone(&places);
            async move { drop(places.take().await) }
        });
        drop((busy, first));
        timeout(SOON, next).await.unwrap().unwrap();
        timeout(SOON, places.emptied()).await.unwrap();
        assert_eq!(places.idle().waiting.len(), 0);
    }
}
