//! Checks whether the next ADD would succeed by running the code of an ADD, and sets readiness by the result. The
//! check therefore meets any LSM, seccomp filter or missing right that an ADD would meet.

use std::{sync::Arc, time::Duration};

use inpod_service::{Readiness, abort_on_panic};
use inpod_types::{Backoff, Failure, Reason};
use tokio::{
    sync::Notify,
    task::{JoinError, JoinHandle, JoinSet, spawn_blocking},
    time::{sleep, timeout},
};
use tonic::Status;

use crate::{apply::Writer, error::Failed, probes, selftest};

/// The readiness condition which states that the last check could apply an ADD's rules.
const CONDITION: &str = "apply";

const RETRY: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));

/// The default timeout of an ADD, after which a check continues, but counts as failed until done.
const TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Clone, Debug, Default)]
pub(crate) struct Recheck(Arc<Notify>);

impl Recheck {
    /// Requests another check after a failure that may affect all pods.
    pub(crate) fn observe<T>(&self, result: Result<T, Status>) -> Result<T, Status> {
        result.inspect_err(|status| {
            if may_affect_all_pods(inpod_proto::failure_of(status).reason) {
                self.0.notify_one();
            }
        })
    }
}

fn may_affect_all_pods(reason: Reason) -> bool {
    reason == Reason::KernelRefused
}

/// Starts the checks, of which one must succeed before netconfig becomes ready.
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

/// Checks at once, after each failure, and on each request.
async fn run(
    writer: Arc<Writer>,
    probes: probes::ProbeSettings,
    readiness: Readiness,
    recheck: Recheck,
) {
    let mut failed: u32 = 0;
    loop {
        let writer = Arc::clone(&writer);
        let work = spawn_blocking(move || selftest::run(&writer, &probes));
        let outcome = outcome(work, &readiness).await;
        failed = if outcome.is_ok() { 0 } else { failed + 1 };
        readiness.set(CONDITION, outcome);
        sleep(RETRY.delay(failed.saturating_sub(1))).await;
        if failed == 0 {
            recheck.0.notified().await;
        }
    }
}

/// Returns a failure as a sentence that begins with its reason.
async fn outcome(
    mut work: JoinHandle<Result<(), Failed>>,
    readiness: &Readiness,
) -> Result<(), String> {
    let done = match timeout(TIMEOUT, &mut work).await {
        Ok(done) => done,
        Err(_elapsed) => {
            let late = format!("not finished after {} s", TIMEOUT.as_secs());
            let failure = Failure::new(Reason::DeadlineExceeded, late);
            readiness.set(CONDITION, Err(describe_failure(failure)));
            work.await
        }
    };
    let failure = match done {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(error)) => error.into(),
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
