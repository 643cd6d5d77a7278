//! The processes of a measurement, among them a ztunnel that answers at once.

use std::{
    path::Path,
    process::{Child, Command},
    time::Duration,
};

use anyhow::Context as _;
use zds_client::Client;

pub(super) const TIMEOUT: Duration = Duration::from_secs(20);

/// The argument with which the bench executes itself as a ztunnel.
pub(crate) const ZTUNNEL: &str = "ztunnel";

/// Acknowledges every packet at once, until the agent is gone for good.
pub(crate) fn ztunnel(socket: &Path) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        while let Ok(mut client) = Client::connect(socket).await {
            while let Ok(Some(received)) = client.recv().await {
                // A ztunnel closes the descriptor once its listeners are open.
                drop(received);
                client.ack(Ok(())).await?;
            }
        }
        Ok(())
    })
}

#[derive(Debug)]
pub(super) struct Running(Child);

impl Running {
    pub(super) fn start(command: &mut Command) -> anyhow::Result<Self> {
        let child = command.spawn();
        child.map(Self).with_context(|| format!("{command:?}"))
    }

    pub(super) fn pid(&self) -> u32 {
        self.0.id()
    }

    pub(super) fn ztunnel(socket: &Path) -> anyhow::Result<Self> {
        Self::start(
            Command::new(std::env::current_exe()?)
                .arg(ZTUNNEL)
                .arg(socket),
        )
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}
