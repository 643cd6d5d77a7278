use anyhow::Context as _;
use futures_util::{Stream, StreamExt as _};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::watch,
};

/// Signals a shutdown. The first SIGTERM or SIGINT drains the server, and the second ends the process.
#[derive(Clone, Debug)]
pub struct Shutdown(watch::Receiver<bool>);

impl Shutdown {
    /// Starts a task that listens for SIGTERM and SIGINT. The returned sender requests a shutdown without a signal.
    pub(crate) fn on_signals() -> anyhow::Result<(watch::Sender<bool>, Self)> {
        let (sender, shutdown) = Self::manual();
        let terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
        let interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
        tokio::spawn(handle_signals(terminate, interrupt, sender.clone()));
        Ok((sender, shutdown))
    }

    /// Creates a shutdown without signals, requested through the returned sender.
    pub fn manual() -> (watch::Sender<bool>, Self) {
        let (sender, receiver) = watch::channel(false);
        (sender, Self(receiver))
    }

    pub fn is_requested(&self) -> bool {
        *self.0.borrow()
    }

    pub async fn requested(mut self) {
        // A dropped sender counts as a request, too.
        drop(self.0.wait_for(|requested| *requested).await);
    }

    /// Ends the stream at shutdown, because watchers must not delay the drain.
    pub fn end_stream<S: Stream>(&self, stream: S) -> impl Stream<Item = S::Item> + use<S> {
        stream.take_until(self.clone().requested())
    }
}

async fn handle_signals(mut terminate: Signal, mut interrupt: Signal, stop: watch::Sender<bool>) {
    either_signal(&mut terminate, &mut interrupt).await;
    tracing::info!("Draining");
    stop.send_replace(true);
    either_signal(&mut terminate, &mut interrupt).await;
    tracing::warn!("Exiting on a second signal");
    #[expect(clippy::exit, reason = "the second signal asks for exactly this")]
    std::process::exit(1)
}

async fn either_signal(terminate: &mut Signal, interrupt: &mut Signal) {
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}
