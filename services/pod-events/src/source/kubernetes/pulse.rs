//! Whether the API server still speaks. A watch of a quiet cluster says nothing for a minute; a server that hangs says
//! nothing either. So when nothing was heard from it for [`QUIET`], it is asked the cheapest question that there is.

use std::{sync::Arc, time::Duration};

use kube::Client;
use tokio::{
    sync::watch,
    time::{Instant, sleep_until, timeout},
};

/// How long the server may be silent before it is asked, less up to a quarter by chance. A cluster of 5,000 quiet nodes
/// asks at most 334 times a second, a kubelet's leases alone are 500.
const QUIET: Duration = Duration::from_secs(20);

/// How long it may take to answer. A server that hangs is found out within [`QUIET`] and this.
const ANSWER: Duration = Duration::from_secs(10);

/// When the server was last heard, and who is told that it is silent.
#[derive(Debug)]
pub(super) struct Pulse {
    heard: watch::Sender<Instant>,
    silences: watch::Sender<String>,
}

impl Pulse {
    pub(super) fn new() -> Self {
        Self {
            heard: watch::Sender::new(Instant::now()),
            silences: watch::Sender::new(String::new()),
        }
    }

    /// The server said something.
    pub(super) fn hear(&self) {
        self.heard.send_replace(Instant::now());
    }

    /// Changes each time the server is found to be silent, to the reason. What was found before does not count.
    pub(super) fn silences(&self) -> watch::Receiver<String> {
        self.silences.subscribe()
    }

    /// Asks the server whenever it was silent for too long, for ever.
    pub(super) async fn feel(self: Arc<Self>, client: Client) {
        loop {
            let quiet = QUIET - (QUIET / 4).mul_f64(fastrand::f64());
            loop {
                let due = *self.heard.borrow() + quiet;
                if due <= Instant::now() {
                    break;
                }
                sleep_until(due).await;
            }
            if let Err(why) = speaks(&client).await {
                self.silences.send_replace(why);
            }
            self.hear();
        }
    }
}

/// Whether the server answers, be it with a refusal.
async fn speaks(client: &Client) -> Result<(), String> {
    let question = http::Request::get("/version").body(Vec::new());
    let question = question.map_err(|error| error.to_string())?;
    match timeout(ANSWER, client.request_text(question)).await {
        Ok(Ok(_) | Err(kube::Error::Api(_))) => Ok(()),
        Ok(Err(error)) => Err(inpod_kube::told(&error)),
        Err(_) => Err("the API server does not answer".to_owned()),
    }
}
