//! Forwards events spooled while pod-events was away to the tasks, in order.

use std::time::Duration;

use inpod_types::SandboxRef;
use tokio::{sync::oneshot, time::timeout};

use super::Registry;
use crate::{
    pod::PodKey,
    tasks::task::{Command, OfflineAdd, ReplayOutcome},
};

/// Limits how long a task may be busy. Events not handled by then are replayed later.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);

impl Registry {
    /// Waits until the end of a sandbox is recorded. The replay waits for nothing else.
    pub async fn replay_delete(&self, sandbox: &SandboxRef) -> ReplayOutcome {
        let Some(key) = self.owner(sandbox) else {
            return ReplayOutcome::Done;
        };
        let (reply, answer) = oneshot::channel();
        self.dispatch(&key, Command::ReplayDelete(sandbox.clone(), reply));
        await_reply(answer).await
    }

    /// Waits until the admission of a pod is recorded. The replay waits for nothing else.
    pub async fn replay_add(&self, key: &PodKey, admitted: OfflineAdd) -> ReplayOutcome {
        if self.other_owner(key, &admitted.call.sandbox).is_some() {
            return ReplayOutcome::Dropped("its container belongs to another pod".to_owned());
        }
        let (reply, answer) = oneshot::channel();
        self.dispatch(key, Command::ReplayAdd(admitted, reply));
        await_reply(answer).await
    }
}

async fn await_reply(answer: oneshot::Receiver<ReplayOutcome>) -> ReplayOutcome {
    match timeout(REPLY_TIMEOUT, answer).await {
        Ok(Ok(settled)) => settled,
        Ok(Err(_)) => ReplayOutcome::Retry("the pod's task has ended".to_owned()),
        Err(_) => ReplayOutcome::Retry("the pod's task is busy".to_owned()),
    }
}

#[cfg(test)]
mod tests;
