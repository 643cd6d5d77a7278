use std::{sync::Arc, time::Duration};

use inpod_types::{Failure, NetnsRef, Reason};
use tokio::time::Instant;

use super::Registry;
use crate::{
    clients::deadline_in,
    pod::Pod,
    tasks::task::{record_without_netns, should_be_enrolled},
};

/// The time after which the search of the pod's task has usually ended.
const RETRY_AFTER: Duration = Duration::from_secs(2);

impl Registry {
    /// Finds the netns of a pod of the source that has no sandbox. Keeps no claim, even if the caller is cancelled.
    ///
    /// # Errors
    ///
    /// `SANDBOX_AWAITED` if the pod has no address yet, or is to join the mesh: then the pod's task is already
    /// searching for the netns and keeps it. Otherwise netconfig's failure.
    pub(crate) async fn find_netns(
        &self,
        pod: Option<&Pod>,
        deadline: Instant,
    ) -> Result<NetnsRef, Failure> {
        let not_found_yet = |message: &str| Failure::new(Reason::SandboxAwaited, message);
        let pod = pod.ok_or_else(|| not_found_yet("the pod's netns is not known"))?;
        if should_be_enrolled(&self.shared, pod, true) {
            let message = "the pod is to join the mesh; the search for its netns is in progress";
            return Err(not_found_yet(message).retry_after(RETRY_AFTER));
        }
        if pod.addresses.is_empty() {
            let message = "no ADD was seen for the pod, and its status has no address";
            return Err(not_found_yet(message));
        }
        let (shared, placeholder) = (Arc::clone(&self.shared), record_without_netns(pod)?);
        let search = tokio::spawn(async move {
            let pipeline = &shared.pipeline;
            let found = pipeline.find(&placeholder, false, deadline).await?;
            let release = pipeline.clients.release(&found.sandbox, deadline_in(2));
            release.await.map(|()| found.expected_netns())
        });
        let ended = |_| Err(Failure::new(Reason::Internal, "the search has ended"));
        search.await.unwrap_or_else(ended)
    }
}
