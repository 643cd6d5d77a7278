//! Measures how long the view of the pods has been out of sync.

use tokio::{sync::watch, time::Instant};

use crate::source::Health;

/// Returns a function that returns the seconds out of sync, or 0 while in sync.
pub(super) fn track(mut health: watch::Receiver<Health>) -> impl Fn() -> u64 {
    let (sender, since) = watch::channel(Some(Instant::now()));
    tokio::spawn(async move {
        loop {
            let is_in_sync = matches!(&*health.borrow_and_update(), Some(Ok(())));
            sender.send_modify(|since| {
                let known = since.unwrap_or_else(Instant::now);
                *since = (!is_in_sync).then_some(known);
            });
            if health.changed().await.is_err() {
                return;
            }
        }
    });
    move || {
        let since = *since.borrow();
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
        let view_age = track(receiver);
        let mut ages = Vec::new();
        for next in [
            Some(Err("away".to_owned())),
            Some(Ok(())),
            Some(Err("gone".to_owned())),
        ] {
            advance(Duration::from_secs(3)).await;
            ages.push(view_age());
            health.send(next).unwrap();
            yield_now().await;
        }
        advance(Duration::from_secs(5)).await;
        ages.push(view_age());
        assert_eq!(ages, [3, 6, 0, 5]);
    }
}
