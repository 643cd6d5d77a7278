//! The client, and what it overhears.

use std::path::Path;

use inpod_kube::ReachError;
use kube::{Client, client::ClientBuilder};
use tower::util::MapResponseLayer;

use super::pace::Pace;

/// An API server that can be asked.
#[derive(Clone)]
pub(in crate::source) struct Reached {
    pub(super) client: Client,
    /// When it wants to be asked again.
    pub(super) pace: Pace,
}

/// A client, without asking anybody yet.
pub(in crate::source) async fn client(kubeconfig: Option<&Path>) -> Result<Reached, ReachError> {
    let config = inpod_kube::config(kubeconfig).await?;
    let builder = ClientBuilder::try_from(config).map_err(ReachError::client(kubeconfig))?;
    let pace = Pace::default();
    let reads = pace.clone();
    let layer = MapResponseLayer::new(move |answer: http::Response<_>| {
        reads.read(&answer);
        answer
    });
    let client = builder.with_layer(&layer).build();
    Ok(Reached { client, pace })
}
