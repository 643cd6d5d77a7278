use std::sync::Arc;

use anyhow::Context as _;
use futures_util::{Stream, StreamExt as _};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::watch,
};

/// Tells a process when to stop: the first SIGTERM or SIGINT drains, the second ends it at once.
#[derive(Clone, Debug)]
pub struct Shutdown(watch::Receiver<bool>);

/// Has the process stop without a signal.
#[derive(Clone, Debug, Default)]
pub(crate) struct StopHandle(Arc<watch::Sender<bool>>);

impl StopHandle {
    pub(crate) fn stop(&self) {
        self.0.send_replace(true);
    }
}

impl Shutdown {
    /// Listens for signals.
    pub(crate) fn on_signals() -> anyhow::Result<(StopHandle, Self)> {
        let (sender, receiver) = watch::channel(false);
        let sender = StopHandle(Arc::new(sender));
        let terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
        let interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
        tokio::spawn(handle_signals(terminate, interrupt, sender.clone()));
        Ok((sender, Self(receiver)))
    }

    /// One that is requested by the sender given back with it. For tests.
    pub fn manual() -> (watch::Sender<bool>, Self) {
        let (sender, receiver) = watch::channel(false);
        (sender, Self(receiver))
    }

    /// Whether the process is to stop.
    pub fn is_requested(&self) -> bool {
        *self.0.borrow()
    }

    /// Resolves when the process is to stop.
    pub async fn requested(mut self) {
        // A sender that is gone means the same.
        drop(self.0.wait_for(|requested| *requested).await);
    }

    /// The stream, ended when the process is to stop: a watcher must not hold up the drain.
    pub fn end_stream<S: Stream>(&self, stream: S) -> impl Stream<Item = S::Item> + use<S> {
        stream.take_until(self.clone().requested())
    }
}

async fn handle_signals(mut terminate: Signal, mut interrupt: Signal, stop: StopHandle) {
    either_signal(&mut terminate, &mut interrupt).await;
    tracing::info!("Draining");
    stop.stop();
    either_signal(&mut terminate, &mut interrupt).await;
    tracing::warn!("Ended by a second signal");
    #[expect(clippy::exit, reason = "the second signal asks for exactly this")]
    std::process::exit(1)
}

async fn either_signal(terminate: &mut Signal, interrupt: &mut Signal) {
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}
