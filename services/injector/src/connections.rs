//! Limits the number of connections. At the limit, a new connection evicts the connection that has been idle for
//! longest: API servers keep their connections open for the next review, and other clients must not keep API servers
//! out.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use prometheus_client::metrics::counter::Counter;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

#[derive(Debug)]
pub(crate) struct Connections {
    free: Arc<Semaphore>,
    max: usize,
    idle: Mutex<Idle>,
    /// Wakes a task that waits for a slot, as soon as a connection becomes idle.
    became_idle: Notify,
    evictions: Counter,
}

#[derive(Debug, Default)]
struct Idle {
    last: u64,
    waiting: BTreeMap<u64, Arc<Notify>>,
}

/// The slot of a connection, which is freed on drop.
#[derive(Debug)]
pub(crate) struct ConnectionSlot {
    connections: Arc<Connections>,
    /// The position in the order of idle connections, or `None` while a request is in progress.
    idle_position: Mutex<Option<u64>>,
    evict: Arc<Notify>,
    _permit: OwnedSemaphorePermit,
}

/// A guard that keeps a connection busy, and therefore safe from eviction.
#[derive(Debug)]
pub(crate) struct BusyGuard(Arc<ConnectionSlot>);

impl Connections {
    /// Creates `max` slots, and counts evictions in the given counter.
    pub(crate) fn new(max: usize, evictions: Counter) -> Arc<Self> {
        Arc::new(Self {
            free: Arc::new(Semaphore::new(max)),
            max,
            idle: Mutex::default(),
            became_idle: Notify::new(),
            evictions,
        })
    }

    /// Acquires a slot, which is idle until the first request. Without a free slot, evicts the connection that has been
    /// idle for longest, or else the first connection that becomes idle.
    pub(crate) async fn acquire(self: &Arc<Self>) -> Arc<ConnectionSlot> {
        loop {
            let is_slot_expected = self.free.available_permits() > 0 || self.evict_idlest();
            tokio::select! {
                () = self.became_idle.notified(), if !is_slot_expected => {}
                // The semaphore is never closed, so the call does not fail.
                permit = Arc::clone(&self.free).acquire_owned() => {
                    if let Ok(permit) = permit {
                        return ConnectionSlot::new(self, permit);
                    }
                }
            }
        }
    }

    pub(crate) async fn wait_empty(&self) {
        let all = u32::try_from(self.max).unwrap_or(u32::MAX);
        drop(self.free.acquire_many(all).await);
    }

    fn idle(&self) -> MutexGuard<'_, Idle> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn evict_idlest(&self) -> bool {
        let idlest = self.idle().waiting.pop_first();
        if let Some((_, evict)) = &idlest {
            self.evictions.inc();
            evict.notify_one();
        }
        idlest.is_some()
    }
}

impl ConnectionSlot {
    fn new(connections: &Arc<Connections>, permit: OwnedSemaphorePermit) -> Arc<Self> {
        let slot = Arc::new(Self {
            connections: Arc::clone(connections),
            idle_position: Mutex::default(),
            evict: Arc::default(),
            _permit: permit,
        });
        slot.mark_idle();
        slot
    }

    fn idle_position(&self) -> MutexGuard<'_, Option<u64>> {
        self.idle_position
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn mark_idle(&self) {
        let mut idle = self.connections.idle();
        idle.last += 1;
        let last = idle.last;
        idle.waiting.insert(last, Arc::clone(&self.evict));
        drop(idle);
        *self.idle_position() = Some(last);
        self.connections.became_idle.notify_one();
    }

    fn mark_busy(&self) {
        if let Some(idle_position) = self.idle_position().take() {
            drop(self.connections.idle().waiting.remove(&idle_position));
        }
    }

    pub(crate) fn start_request(self: &Arc<Self>) -> BusyGuard {
        self.mark_busy();
        BusyGuard(Arc::clone(self))
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.idle_position().is_none()
    }

    /// Closes the connection as soon as it has no request in progress.
    pub(crate) fn evict(&self) {
        self.evict.notify_one();
    }

    pub(crate) async fn wait_evicted(&self) {
        self.evict.notified().await;
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.mark_busy();
    }
}

impl Drop for BusyGuard {
    fn drop(&mut self) {
        self.0.mark_idle();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    const SOON: Duration = Duration::from_secs(20);
    const A_WHILE: Duration = Duration::from_millis(50);

    /// Holds a slot until the eviction, as connections do.
    fn held(slot: Arc<ConnectionSlot>) -> tokio::task::JoinHandle<()> {
        tokio::spawn(async move {
            slot.wait_evicted().await;
            drop(slot);
        })
    }

    async fn take(connections: &Arc<Connections>) -> Arc<ConnectionSlot> {
        timeout(SOON, connections.acquire()).await.unwrap()
    }

    #[tokio::test]
    async fn the_idlest_makes_room_and_no_other() {
        let evictions = Counter::default();
        let connections = Connections::new(2, evictions.clone());
        let (first, second) = (take(&connections).await, take(&connections).await);
        // The first connection had a request after the second connection was opened.
        drop(first.start_request());
        let (first, second) = (held(first), held(second));
        let _third = take(&connections).await;
        second.await.unwrap();
        assert!(!first.is_finished());
        assert_eq!(evictions.get(), 1);
    }

    #[tokio::test]
    async fn one_that_is_worked_for_never_makes_room_until_it_is_idle() {
        let connections = Connections::new(1, Counter::default());
        let first = take(&connections).await;
        let busy = first.start_request();
        assert!(first.is_busy());
        let first = held(first);
        assert!(timeout(A_WHILE, connections.acquire()).await.is_err());
        let next = tokio::spawn({
            let connections = Arc::clone(&connections);
            async move { connections.acquire().await }
        });
        drop(busy);
        timeout(SOON, first).await.unwrap().unwrap();
        timeout(SOON, next).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_freed_slot_is_available_to_the_next_connection_and_finally_all_are_free() {
        let connections = Connections::new(1, Counter::default());
        let first = take(&connections).await;
        let busy = first.start_request();
        let next = tokio::spawn({
            let connections = Arc::clone(&connections);
            async move { drop(connections.acquire().await) }
        });
        drop((busy, first));
        timeout(SOON, next).await.unwrap().unwrap();
        timeout(SOON, connections.wait_empty()).await.unwrap();
        assert_eq!(connections.idle().waiting.len(), 0);
    }
}
