//! How old the view of this node's pods is.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::{sync::watch, time::Instant};

use crate::source::Health;

/// Since when the view is not in step with its source. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct View(Arc<Mutex<Option<Instant>>>);

impl View {
    /// Follows the source for as long as it lives.
    pub(super) fn of(health: watch::Receiver<Health>) -> Self {
        let view = Self(Arc::new(Mutex::new(Some(Instant::now()))));
        tokio::spawn(view.clone().follow(health));
        view
    }

    async fn follow(self, mut health: watch::Receiver<Health>) {
        loop {
            let is_in_step = matches!(&*health.borrow_and_update(), Some(Ok(())));
            self.saw(is_in_step);
            if health.changed().await.is_err() {
                return;
            }
        }
    }

    fn saw(&self, is_in_step: bool) {
        let mut since = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *since = if is_in_step {
            None
        } else {
            since.or_else(|| Some(Instant::now()))
        };
    }

    /// For how many seconds it has not been in step; 0 while it is.
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
    async fn the_age_counts_from_when_the_view_was_last_in_step() {
        let (health, told) = watch::channel(None);
        let view = View::of(told);
        let mut ages = Vec::new();
        for next in [
            Some(Err("away".to_owned())),
            Some(Ok(())),
            Some(Err("gone".to_owned())),
        ] {
            advance(Duration::from_secs(3)).await;
            ages.push(view.seconds());
            health.send(next).unwrap();
            yield_now().await;
        }
        advance(Duration::from_secs(5)).await;
        ages.push(view.seconds());
        assert_eq!(ages, [3, 6, 0, 5]);
    }
}
