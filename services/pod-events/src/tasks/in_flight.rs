//! Tracks unanswered ADDs, so that the DEL of a sandbox cancels its ADDs wherever the ADDs wait.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::SystemTime,
};

use futures_util::future::join_all;
use inpod_types::{Failure, Reason, SandboxRef};
use tokio::{sync::watch, time::Instant};

use crate::{
    counters::{Phase, Phases},
    pod::PodKey,
    tasks::task::{AddCall, wall_clock},
};

#[derive(Clone, Debug, Default)]
pub(crate) struct InFlight(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    next: u64,
    adds: BTreeMap<u64, Add>,
}

#[derive(Debug)]
struct Add {
    key: PodKey,
    sandbox: SandboxRef,
    phases: Phases,
    until: Instant,
    cancel: watch::Sender<()>,
}

/// The wait of an unanswered ADD.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AddWait {
    pub(crate) phase: Phase,
    pub(crate) since: SystemTime,
    /// The time at which the ADD gives up.
    pub(crate) until: SystemTime,
}

impl InFlight {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers an ADD until the returned value is dropped. Returns the other pod if another pod has an ADD of the
    /// same container in flight.
    pub(crate) fn begin(&self, key: &PodKey, call: &AddCall) -> Result<InFlightAdd, PodKey> {
        let sandbox = &call.sandbox;
        let (cancel, cancelled) = watch::channel(());
        let mut state = self.lock();
        let is_other =
            |add: &&Add| add.sandbox.container_id == sandbox.container_id && add.key != *key;
        if let Some(add) = state.adds.values().find(is_other) {
            return Err(add.key.clone());
        }
        let number = state.next;
        state.next += 1;
        let add = Add {
            key: key.clone(),
            sandbox: sandbox.clone(),
            phases: call.phases.clone(),
            until: call.work_deadline,
            cancel,
        };
        state.adds.insert(number, add);
        Ok(InFlightAdd {
            in_flight: self.clone(),
            number,
            cancelled,
        })
    }

    pub(crate) fn wait_of(&self, key: &PodKey) -> Option<AddWait> {
        let state = self.lock();
        let add = state.adds.values().rev().find(|add| add.key == *key)?;
        let (phase, since) = add.phases.current();
        Some(AddWait {
            phase,
            since: SystemTime::now() - since.elapsed(),
            until: wall_clock(add.until),
        })
    }

    /// Cancels a sandbox's ADDs and returns once the ADDs have ended, so that later commands to the pod's task are
    /// ordered after them. Returns the pod of the sandbox.
    pub(crate) async fn cancel(&self, sandbox: &SandboxRef) -> Option<PodKey> {
        let mut matching: Vec<Add> = {
            let mut state = self.lock();
            let matching = state.adds.extract_if(.., |_, add| add.sandbox == *sandbox);
            matching.map(|(_, add)| add).collect()
        };
        join_all(matching.iter().map(|add| {
            add.cancel.send_replace(());
            add.cancel.closed()
        }))
        .await;
        matching.pop().map(|add| add.key)
    }
}

#[derive(Debug)]
pub(crate) struct InFlightAdd {
    in_flight: InFlight,
    number: u64,
    cancelled: watch::Receiver<()>,
}

impl InFlightAdd {
    pub(crate) async fn cancelled(&mut self) -> Failure {
        if self.cancelled.changed().await.is_err() {
            // The registry is gone: the process ends.
            std::future::pending::<()>().await;
        }
        let message = "the sandbox was deleted during its ADD";
        Failure::new(Reason::SandboxNotCurrent, message)
    }
}

impl Drop for InFlightAdd {
    fn drop(&mut self) {
        self.in_flight.lock().adds.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;
    use crate::testing::{add_call, sandbox};

    fn key() -> PodKey {
        ("shop".parse().unwrap(), "web".parse().unwrap())
    }

    #[tokio::test]
    async fn a_delete_ends_the_adds_of_its_sandbox_and_waits_until_they_have_ended() {
        let in_flight = InFlight::default();
        let mut add = in_flight.begin(&key(), &add_call("a")).unwrap();
        let mut other = in_flight.begin(&key(), &add_call("b")).unwrap();
        let ends = sandbox("a");
        let mut delete = Box::pin(in_flight.cancel(&ends));
        assert_eq!(delete.as_mut().now_or_never(), None, "it has not ended");
        assert_eq!(
            add.cancelled().now_or_never().map(|failure| failure.reason),
            Some(Reason::SandboxNotCurrent)
        );
        assert!(other.cancelled().now_or_never().is_none());
        drop(add);
        assert_eq!(delete.await, Some(key()));
    }

    #[tokio::test]
    async fn an_add_that_begins_after_a_delete_or_was_answered_is_not_ended_by_it() {
        let in_flight = InFlight::default();
        drop(in_flight.begin(&key(), &add_call("a")).unwrap());
        assert_eq!(in_flight.cancel(&sandbox("a")).await, None);
        let mut later = in_flight.begin(&key(), &add_call("a")).unwrap();
        assert!(later.cancelled().now_or_never().is_none());
    }
}
