//! A pod's task that came to an end by a defect: another takes its place, with what was written down of the pod.
//!
//! It is one pod's affair, and the others go on. Whoever asks something of the pod has a new task at once
//! ([`Registry::ask`]); where nobody does, the pod would not be looked after, and nobody would know.

use std::{panic::AssertUnwindSafe, time::Duration};

use futures_util::FutureExt as _;
use tokio::{sync::oneshot, time::sleep};

use super::Registry;
use crate::{source::PodKey, task::Command};

/// How long a pod is left alone then: what made its task fail may do so again.
const RESTART_DELAY: Duration = Duration::from_secs(10);

impl Registry {
    /// Has a pod's task run to its end, and the pod looked after where that end is no good one.
    pub(super) fn supervise(&self, key: PodKey, task: impl Future<Output = ()> + Send + 'static) {
        let registry = self.clone();
        // Nothing of the task is looked at after its end: its view is replaced with what is written down.
        let task = AssertUnwindSafe(task).catch_unwind();
        tokio::spawn(async move {
            if task.await.is_err() {
                let pod = format!("{}/{}", key.0, key.1);
                tracing::error!(pod, retry_in = ?RESTART_DELAY, "A pod's task has ended by a defect");
                sleep(RESTART_DELAY).await;
                registry.restart(&key);
            }
        });
    }

    /// Has a pod's claim made sure of and the pod looked at: a netconfig may have been restarted while nobody was there
    /// to be told.
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
        registry::Handle,
        source::PodKey,
        testing::{record, shared},
    };

    fn web() -> PodKey {
        ("shop".parse().unwrap(), "web".parse().unwrap())
    }

    /// A node on which a pod has a record, and where the pod's task is no more.
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
            interrupts: watch::channel(crate::task::Interrupts::default()).0,
            view: Arc::default(),
        };
        registry.tasks().running.insert(web(), gone);
        registry
    }

    /// The containers of the pod's sandboxes, as a task shows them.
    fn shown(registry: &Registry) -> Vec<String> {
        let view = registry.view(&web()).unwrap_or_default();
        let records = view.records.iter();
        records
            .map(|record| record.sandbox.container_id.to_string())
            .collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_whose_task_panics_is_looked_after_by_another_a_while_later() {
        let dir = tempfile::tempdir().unwrap();
        let registry = without_task(dir.path()).await;
        registry.supervise(web(), async { panic!("a defect") });
        sleep(RESTART_DELAY / 2).await;
        assert_eq!(shown(&registry), [""; 0]);
        sleep(RESTART_DELAY).await;
        assert_eq!(shown(&registry), ["a"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_ends_as_it_should_has_no_successor() {
        let dir = tempfile::tempdir().unwrap();
        let registry = without_task(dir.path()).await;
        registry.supervise(web(), async {});
        sleep(RESTART_DELAY * 2).await;
        assert_eq!(shown(&registry), [""; 0]);
    }
}
