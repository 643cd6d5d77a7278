//! Measures how long the view of the pods has been out of sync.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::{sync::watch, time::Instant};

use crate::source::Health;

/// The time since which the view has been out of sync, if any.
#[derive(Clone, Debug)]
pub(super) struct ViewAge(Arc<Mutex<Option<Instant>>>);

impl ViewAge {
    pub(super) fn track(health: watch::Receiver<Health>) -> Self {
        let view_age = Self(Arc::new(Mutex::new(Some(Instant::now()))));
        tokio::spawn(view_age.clone().follow(health));
        view_age
    }

    async fn follow(self, mut health: watch::Receiver<Health>) {
        loop {
            let is_in_sync = matches!(&*health.borrow_and_update(), Some(Ok(())));
            self.record(is_in_sync);
            if health.changed().await.is_err() {
                return;
            }
        }
    }

    fn record(&self, is_in_sync: bool) {
        let mut since = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *since = if is_in_sync {
            None
        } else {
            since.or_else(|| Some(Instant::now()))
        };
    }

    /// Returns the seconds out of sync, or 0 while in sync.
    pub(super) fn seconds(&self) -> u64 {
        let since = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        since.map_or(0, |since| since.elapsed().as_secs())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::{task::yield_now, time::advance};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_age_counts_from_when_the_view_was_last_in_sync() {
        let (health, receiver) = watch::channel(None);
        let view_age = ViewAge::track(receiver);
        let mut ages = Vec::new();
        for next in [
            Some(Err("away".to_owned())),
            Some(Ok(())),
            Some(Err("gone".to_owned())),
        ] {
            advance(Duration::from_secs(3)).await;
            ages.push(view_age.seconds());
            health.send(next).unwrap();
            yield_now().await;
        }
        advance(Duration::from_secs(5)).await;
        ages.push(view_age.seconds());
        assert_eq!(ages, [3, 6, 0, 5]);
    }
}
