//! A ztunnel for tests and demos that behaves like stock ztunnel on ZDS.

use std::process::ExitCode;

use reference_ztunnel::{Options, serve};
use tracing_subscriber::EnvFilter;

// A single thread proves that no thread of the runtime enters the netns of a pod.
#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let options = Options::parse();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .init();
    match serve(options).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(%error, "exiting");
            ExitCode::FAILURE
        }
    }
}
