//! Checks whether the next ADD would succeed, by doing what an ADD does. Readiness follows from the outcome. An LSM,
//! seccomp or a missing right is thereby found by meeting it, in the same code paths as in an ADD.

use std::{sync::Arc, time::Duration};

use inpod_service::{Readiness, abort_on_panic};
use inpod_types::{Failure, Reason};
use tokio::{
    sync::Notify,
    task::{JoinError, JoinHandle, JoinSet, spawn_blocking},
    time::{sleep, timeout},
};
use tonic::Status;

use crate::{
    BACKEND,
    apply::Writer,
    error::IntoFailure as _,
    probes,
    selftest::{self, SelfTestError},
};

/// Readiness condition: the last preflight check could apply an ADD's rules.
const CONDITION: &str = "apply";

/// Delay between two checks. It doubles with each failure in a row, up to the maximum.
const MIN_RETRY_INTERVAL: Duration = Duration::from_secs(1);
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(60);

/// The default timeout of an ADD. A check that takes longer continues, and counts as failed until it is done.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Triggers another check. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct Recheck(Arc<Notify>);

impl Recheck {
    /// Triggers another check if a call failed for a reason that may affect all pods.
    pub(crate) fn observe<T>(&self, result: Result<T, Status>) -> Result<T, Status> {
        result.inspect_err(|status| {
            if may_affect_all_pods(inpod_proto::failure_of(status).reason) {
                self.0.notify_one();
            }
        })
    }
}

/// Returns whether a failure with this reason may affect every pod.
fn may_affect_all_pods(reason: Reason) -> bool {
    [
        Reason::KernelRefused,
        Reason::BackendUnavailable,
        Reason::BackendBusy,
    ]
    .contains(&reason)
}

/// Makes readiness depend on the first check, and starts the task that checks.
pub(crate) fn start(
    tasks: &mut JoinSet<()>,
    writer: &Arc<Writer>,
    probes: probes::ProbeSettings,
    readiness: &Readiness,
) -> Recheck {
    let recheck = Recheck::default();
    readiness.require(CONDITION, "not checked yet");
    let runs = run(
        Arc::clone(writer),
        probes,
        readiness.clone(),
        recheck.clone(),
    );
    tasks.spawn(abort_on_panic("preflight", runs));
    recheck
}

/// Checks at once, again after each failure, and whenever a recheck is triggered.
async fn run(
    writer: Arc<Writer>,
    probes: probes::ProbeSettings,
    readiness: Readiness,
    recheck: Recheck,
) {
    let mut failed = 0;
    loop {
        let (writer, probes) = (Arc::clone(&writer), probes.clone());
        let work = spawn_blocking(move || selftest::preflight(&writer, &probes));
        let outcome = outcome(work, &readiness).await;
        failed = if outcome.is_ok() { 0 } else { failed + 1 };
        if failed == 0 {
            // The check has just used the backend, whatever detection found at the start.
            readiness.set(BACKEND, Ok(()));
        }
        readiness.set(CONDITION, outcome);
        sleep(retry_interval(failed)).await;
        if failed == 0 {
            recheck.0.notified().await;
        }
    }
}

/// Waits for a check. A failure is a sentence that begins with its reason.
async fn outcome(
    mut work: JoinHandle<Result<(), SelfTestError>>,
    readiness: &Readiness,
) -> Result<(), String> {
    let done = match timeout(TIMEOUT, &mut work).await {
        Ok(done) => done,
        Err(_elapsed) => {
            let late = format!("not finished after {} s", TIMEOUT.as_secs());
            readiness.set(
                CONDITION,
                Err(describe_failure(Failure::new(
                    Reason::DeadlineExceeded,
                    late,
                ))),
            );
            work.await
        }
    };
    let failure = match done {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(error)) => error.into_failure(),
        Err(panicked) => panic_failure(&panicked),
    };
    Err(describe_failure(failure))
}

fn panic_failure(panicked: &JoinError) -> Failure {
    Failure::new(Reason::Internal, format!("netconfig failed: {panicked}"))
}

fn describe_failure(failure: Failure) -> String {
    let Failure {
        reason, message, ..
    } = failure;
    tracing::warn!(%reason, error = message, "The preflight check failed: ADDs of mesh pods would be refused");
    format!("{reason}: {message}")
}

/// Returns the delay after so many failures in a row.
fn retry_interval(failed: u32) -> Duration {
    let doublings = failed.saturating_sub(1).min(16);
    MIN_RETRY_INTERVAL
        .saturating_mul(1 << doublings)
        .min(MAX_RETRY_INTERVAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_failures_the_pauses_grow_to_a_bound_and_after_a_success_they_are_short_again() {
        let seconds =
            [0, 1, 2, 3, 6, 7, 8, u32::MAX].map(|failed| retry_interval(failed).as_secs());
        assert_eq!(seconds, [1, 1, 2, 4, 32, 60, 60, 60]);
    }
}
