//! What happened while nobody listened goes to the tasks, too, in the order of its telling.

use std::time::Duration;

use inpod_types::SandboxRef;
use tokio::{sync::oneshot, time::timeout};

use super::Registry;
use crate::{
    source::PodKey,
    task::{Admitted, Command, Settled},
};

/// How long a task may be busy with something else. What it has not heard then it is told again.
const BUSY: Duration = Duration::from_secs(5);

impl Registry {
    /// A sandbox ended, and nobody was told. Waits until that is written down, and for nothing else.
    pub async fn ended(&self, sandbox: &SandboxRef) -> Settled {
        let Some(key) = self.owner(sandbox) else {
            return Settled::Done;
        };
        let (reply, answer) = oneshot::channel();
        self.ask(&key, Command::Ended(sandbox.clone(), reply));
        heard(answer).await
    }

    /// A pod was let through, and nobody was told. Waits until that is written down, and for nothing else.
    pub async fn admitted(&self, key: &PodKey, admitted: Admitted) -> Settled {
        let (reply, answer) = oneshot::channel();
        self.ask(key, Command::Admitted(admitted, reply));
        heard(answer).await
    }
}

async fn heard(answer: oneshot::Receiver<Settled>) -> Settled {
    match timeout(BUSY, answer).await {
        Ok(Ok(settled)) => settled,
        Ok(Err(_)) => Settled::Later("the pod's task has ended".to_owned()),
        Err(_) => Settled::Later("the pod's task is busy".to_owned()),
    }
}

#[cfg(test)]
mod tests;
