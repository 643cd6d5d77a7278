//! Restarts a pod's task after a panic, from its checkpoint.
//!
//! A command for the pod starts a new task at once ([`Registry::dispatch`]); without a command, the pod would go
//! unmanaged and unnoticed.

use std::{panic::AssertUnwindSafe, sync::Arc, time::Duration};

use futures_util::FutureExt as _;
use tokio::{sync::oneshot, time::sleep};

use super::Registry;
use crate::{pod::PodKey, tasks::task::Command};

/// The delay of a restart, because the cause of the panic may persist.
const RESTART_DELAY: Duration = Duration::from_secs(10);

impl Registry {
    pub(super) fn supervise(
        &self,
        key: Arc<PodKey>,
        task: impl Future<Output = ()> + Send + 'static,
    ) {
        let registry = self.clone();
        // The task is unwind safe: no state of the task is used after a panic, because its view is rebuilt from the
        // checkpoint.
        let task = AssertUnwindSafe(task).catch_unwind();
        tokio::spawn(async move {
            if task.await.is_err() {
                let pod = format!("{}/{}", key.0, key.1);
                tracing::error!(pod, retry_in = ?RESTART_DELAY, "A pod's task has panicked");
                sleep(RESTART_DELAY).await;
                registry.restart(&key);
            }
        });
    }

    /// Starts a new task, which claims again because netconfig may have restarted while no task ran.
    fn restart(&self, key: &PodKey) {
        let (reply, _unheard) = oneshot::channel();
        self.dispatch(key, Command::Reclaim(reply));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::sync::{mpsc, watch};

    use super::*;
    use crate::{
        checkpoint::Intent,
        pod::PodKey,
        tasks::registry::Handle,
        testing::{record, shared},
    };

    fn web() -> PodKey {
        ("shop".parse().unwrap(), "web".parse().unwrap())
    }

    async fn without_task(directory: &std::path::Path) -> Registry {
        let shared = shared(directory).await;
        let known = crate::checkpoint::Record {
            intent: Intent::Adopted,
            ..record("a")
        };
        shared.pipeline.checkpoint.write(&known).unwrap();
        let registry = Registry::new(shared, [].into());
        let gone = Handle {
            commands: mpsc::unbounded_channel().0,
            interrupts: watch::channel(crate::tasks::task::Interrupts::default()).0,
            view: Arc::default(),
        };
        registry.tasks().running.insert(web().into(), gone);
        registry
    }

    fn shown(registry: &Registry) -> Vec<String> {
        let view = registry.view(&web()).unwrap_or_default();
        let records = view.records.iter();
        records
            .map(|record| record.sandbox.container_id.to_string())
            .collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_whose_task_panics_gets_a_new_task_a_while_later() {
        let dir = tempfile::tempdir().unwrap();
        let registry = without_task(dir.path()).await;
        registry.supervise(web().into(), async { panic!("a defect") });
        sleep(RESTART_DELAY / 2).await;
        assert_eq!(shown(&registry), [""; 0]);
        sleep(RESTART_DELAY).await;
        assert_eq!(shown(&registry), ["a"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_ends_regularly_is_not_restarted() {
        let dir = tempfile::tempdir().unwrap();
        let registry = without_task(dir.path()).await;
        registry.supervise(web().into(), async {});
        sleep(RESTART_DELAY * 2).await;
        assert_eq!(shown(&registry), [""; 0]);
    }
}
