use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// Operations per second, with a burst of one second's worth after idle time.
#[derive(Debug)]
pub struct RateLimit {
    interval: Duration,
    burst: Duration,
    /// The time when the next operation would be due if no operation had started early.
    due: Instant,
    acquired: bool,
}

impl RateLimit {
    pub fn new(per_second: u32) -> Self {
        let interval = Duration::from_secs(1) / per_second.max(1);
        let burst = interval * per_second.saturating_sub(1);
        let now = Instant::now();
        Self {
            interval,
            burst,
            due: now.checked_sub(burst).unwrap_or(now),
            acquired: false,
        }
    }

    pub async fn acquire(&mut self) {
        if std::mem::replace(&mut self.acquired, true) {
            self.due += self.interval;
        }
        let now = Instant::now();
        self.due = self.due.max(now.checked_sub(self.burst).unwrap_or(now));
        sleep_until(self.due).await;
    }

    pub fn refund(&mut self) {
        self.acquired = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn five_go_at_once_and_then_five_a_second() {
        let start = Instant::now();
        let mut rate = RateLimit::new(5);
        let mut waits = Vec::new();
        for _ in 0..8 {
            rate.acquire().await;
            waits.push(start.elapsed().as_millis());
        }
        assert_eq!(waits[..5], [0; 5]);
        assert!(waits[5] >= 200 && waits[7] >= 600, "{waits:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_refunded_operation_costs_nothing() {
        let mut rate = RateLimit::new(5);
        let start = Instant::now();
        for _ in 0..100 {
            rate.acquire().await;
            rate.refund();
        }
        assert!(start.elapsed() < Duration::from_millis(10));
    }
}
