//! Connects to the agent, with growing pauses between the attempts.

use std::error::Error;
use std::future::pending;
use std::path::Path;
use std::time::Duration;

use tokio_seqpacket::UnixSeqpacket;

use crate::connection::Connection;
use crate::options::Fault;

const FIRST: Duration = Duration::from_millis(20);
const MAX_PAUSE: Duration = Duration::from_secs(15);

/// Connects to the agent, and retries until the connection and the hello succeed.
pub(crate) async fn connect(path: &Path, fault: Fault) -> Connection {
    let max_pause = if fault == Fault::LongBackoff {
        Duration::from_secs(60)
    } else {
        MAX_PAUSE
    };
    insist(max_pause, async || Connection::open(path, fault).await).await
}

/// Injects the fault of a silent ztunnel: connects, then never sends or reads.
pub(crate) async fn connect_silently<T>(path: &Path) -> T {
    let _connected = insist(MAX_PAUSE, async || UnixSeqpacket::connect(path).await).await;
    pending().await
}

async fn insist<T, E: Error>(
    max_pause: Duration,
    mut attempt: impl AsyncFnMut() -> Result<T, E>,
) -> T {
    let mut backoff = Backoff::new(max_pause);
    loop {
        match attempt().await {
            Ok(connected) => return connected,
            Err(error) => {
                let pause = backoff.pause();
                tracing::warn!(error = %chain(&error), ?pause, "no connection to the agent");
                tokio::time::sleep(pause).await;
            }
        }
    }
}

fn chain(error: &dyn Error) -> String {
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// The doubling pauses of stock ztunnel during one outage.
#[derive(Debug)]
struct Backoff {
    next: Duration,
    max: Duration,
}

impl Backoff {
    const fn new(max: Duration) -> Self {
        Self { next: FIRST, max }
    }

    fn pause(&mut self) -> Duration {
        let pause = self.next.min(self.max);
        self.next = pause.saturating_mul(2);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_from_20_ms_and_stay_at_15_s() {
        let mut backoff = Backoff::new(MAX_PAUSE);
        let pauses: Vec<_> = std::iter::repeat_with(|| backoff.pause().as_millis())
            .take(12)
            .collect();
        let expected = [
            20, 40, 80, 160, 320, 640, 1280, 2560, 5120, 10240, 15000, 15000,
        ];
        assert_eq!(pauses, expected);
    }
}
