//! ADDs that have not been answered: the DEL of a sandbox ends its own, wherever they wait.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use futures_util::future::join_all;
use inpod_types::{Failure, Reason, SandboxRef};
use tokio::sync::watch;

use crate::source::PodKey;

/// The ADDs that are under way. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct Underway(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    next: u64,
    adds: BTreeMap<u64, Add>,
}

#[derive(Debug)]
struct Add {
    key: PodKey,
    sandbox: SandboxRef,
    end: watch::Sender<()>,
}

impl Underway {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An ADD begins. It has ended when the value is dropped.
    pub(crate) fn begin(&self, key: &PodKey, sandbox: &SandboxRef) -> Begun {
        let (end, ended) = watch::channel(());
        let mut state = self.lock();
        let number = state.next;
        state.next += 1;
        let add = Add {
            key: key.clone(),
            sandbox: sandbox.clone(),
            end,
        };
        state.adds.insert(number, add);
        Begun {
            underway: self.clone(),
            number,
            ended,
        }
    }

    /// Ends all ADDs of a sandbox that began before, and returns when they have: whatever their pod's task is asked
    /// from then on comes after them. Tells whose sandbox it was to become.
    pub(crate) async fn end(&self, sandbox: &SandboxRef) -> Option<PodKey> {
        let mut of_it: Vec<Add> = {
            let mut state = self.lock();
            let of_it = state.adds.extract_if(.., |_, add| add.sandbox == *sandbox);
            of_it.map(|(_, add)| add).collect()
        };
        join_all(of_it.iter().map(|add| {
            add.end.send_replace(());
            add.end.closed()
        }))
        .await;
        of_it.pop().map(|add| add.key)
    }
}

/// An ADD that is under way.
#[derive(Debug)]
pub(crate) struct Begun {
    underway: Underway,
    number: u64,
    ended: watch::Receiver<()>,
}

impl Begun {
    /// Resolves when its sandbox is deleted.
    pub(crate) async fn by_delete(&mut self) -> Failure {
        if self.ended.changed().await.is_err() {
            // Nobody can delete it any more: the process ends.
            std::future::pending::<()>().await;
        }
        let message = "the sandbox was deleted while it was added";
        Failure::new(Reason::SandboxNotCurrent, message)
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        self.underway.lock().adds.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;
    use crate::testing::sandbox;

    fn key() -> PodKey {
        ("shop".parse().unwrap(), "web".parse().unwrap())
    }

    #[tokio::test]
    async fn a_delete_ends_the_adds_of_its_sandbox_and_waits_until_they_have_ended() {
        let underway = Underway::default();
        let mut add = underway.begin(&key(), &sandbox("a"));
        let mut other = underway.begin(&key(), &sandbox("b"));
        let ends = sandbox("a");
        let mut delete = Box::pin(underway.end(&ends));
        assert_eq!(delete.as_mut().now_or_never(), None, "it has not ended");
        assert_eq!(
            add.by_delete().now_or_never().map(|failure| failure.reason),
            Some(Reason::SandboxNotCurrent)
        );
        assert!(other.by_delete().now_or_never().is_none());
        drop(add);
        assert_eq!(delete.await, Some(key()));
    }

    #[tokio::test]
    async fn an_add_that_begins_after_a_delete_or_was_answered_is_not_ended_by_it() {
        let underway = Underway::default();
        drop(underway.begin(&key(), &sandbox("a")));
        assert_eq!(underway.end(&sandbox("a")).await, None);
        let mut later = underway.begin(&key(), &sandbox("a"));
        assert!(later.by_delete().now_or_never().is_none());
    }
}
