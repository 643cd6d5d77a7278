//! Probes the API server: in a quiet cluster a watch is silent for a minute, and so is a hanging server. After
//! [`IDLE_TIMEOUT`] without activity, the server is sent the cheapest possible request.

use std::{sync::Arc, time::Duration};

use kube::Client;
use tokio::{
    sync::watch,
    time::{Instant, sleep_until, timeout},
};

/// The idle time before a probe, minus a random part of up to a quarter. A cluster of 5,000 idle nodes sends at most
/// 334 probes a second, while the kubelets' leases alone take 500 requests.
const IDLE_TIMEOUT: Duration = Duration::from_secs(20);

/// The timeout of a probe. A hanging server is noticed within [`IDLE_TIMEOUT`] plus the timeout.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(super) struct Liveness {
    last_activity: watch::Sender<Instant>,
    failures: watch::Sender<String>,
}

impl Liveness {
    pub(super) fn new() -> Self {
        Self {
            last_activity: watch::Sender::new(Instant::now()),
            failures: watch::Sender::new(String::new()),
        }
    }

    pub(super) fn record_activity(&self) {
        self.last_activity.send_replace(Instant::now());
    }

    /// Returns a channel that receives the reason of each later failure.
    pub(super) fn failures(&self) -> watch::Receiver<String> {
        self.failures.subscribe()
    }

    pub(super) async fn poll(self: Arc<Self>, client: Client) {
        loop {
            let idle = IDLE_TIMEOUT - (IDLE_TIMEOUT / 4).mul_f64(fastrand::f64());
            loop {
                let due = *self.last_activity.borrow() + idle;
                if due <= Instant::now() {
                    break;
                }
                sleep_until(due).await;
            }
            if let Err(why) = probe(&client).await {
                self.failures.send_replace(why);
            }
            self.record_activity();
        }
    }
}

/// Sends a probe. Any answer counts as success, even a refusal.
async fn probe(client: &Client) -> Result<(), String> {
    let request = http::Request::get("/version").body(Vec::new());
    let request = request.map_err(|error| error.to_string())?;
    match timeout(PROBE_TIMEOUT, client.request_text(request)).await {
        Ok(Ok(_) | Err(kube::Error::Api(_))) => Ok(()),
        Ok(Err(error)) => Err(inpod_kube::describe_error(&error)),
        Err(_) => Err("the API server does not answer".to_owned()),
    }
}
