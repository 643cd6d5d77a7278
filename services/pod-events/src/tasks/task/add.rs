use std::{
    net::IpAddr,
    pin::{Pin, pin},
    sync::Arc,
};

use inpod_service::Trace;
use inpod_types::{Enrollment, Failure, NetnsRef, PodUid, Reason, SandboxRef};
use tokio::time::Instant;

use super::{Added, CancelReason, POLL_INTERVAL, Task, interrupt};
use crate::{
    admission::Permit,
    boottime::BootInstant,
    checkpoint::{Intent, Record},
    counters::{Phase, Phases},
    pod::Pod,
    tasks::{
        pipeline::{EnrollContext, NetnsState, work_deadline},
        task::resolve::Resolved,
    },
};

#[derive(Clone, Debug)]
pub struct AddCall {
    pub sandbox: SandboxRef,
    /// `None` if the runtime passed no UID.
    pub uid: Option<PodUid>,
    pub netns: NetnsRef,
    pub addresses: Vec<IpAddr>,
    pub deadline: Instant,
    /// The time until which enrollment steps may start. The rest of the caller's time is reserved for undoing the
    /// steps.
    pub work_deadline: Instant,
    pub trace: Trace,
    pub phases: Phases,
}

impl AddCall {
    pub(crate) fn new(
        sandbox: SandboxRef,
        uid: Option<PodUid>,
        netns: NetnsRef,
        addresses: Vec<IpAddr>,
        deadline: Instant,
        trace: Trace,
    ) -> Self {
        Self {
            sandbox,
            uid,
            netns,
            addresses,
            deadline,
            work_deadline: work_deadline(deadline),
            phases: Phases::default(),
            trace,
        }
    }
}

impl Task {
    /// Enrolls the sandbox if its pod is to be in the mesh. A failed ADD undoes its own effects.
    pub(super) async fn add(
        &mut self,
        call: AddCall,
        resolved: Resolved,
        mut caller_gone: Pin<&mut (dyn Future<Output = ()> + Send)>,
    ) -> Result<Added, Failure> {
        self.take_back_delete(&call)?;
        let (pod, decision) = match resolved {
            Resolved::Pod(pod, decision) => (pod, decision),
            Resolved::AdmittedUnenrolled { pod, why } => {
                return self.admit_unenrolled(&call, &pod, why).await;
            }
        };
        let added = Added {
            enrollment: decision.enrollment,
            reason: decision.reason,
            pod: pod.pod.clone(),
        };
        if self.is_additional_interface(&call.sandbox) {
            return Ok(added);
        }
        let mut permit = None;
        let joins = matches!(added.enrollment, Enrollment::Ambient | Enrollment::Sidecar)
            && !self.is_redirected_elsewhere(&call.sandbox, added.enrollment);
        if joins {
            // These checks come before anything is recorded, so a failure has nothing to undo.
            self.shared.pipeline.broker_for(added.enrollment)?;
            self.reject_malformed(&call.sandbox, &pod, added.enrollment)?;
            permit = Some(self.acquire_permit(&call, caller_gone.as_mut()).await?);
        }
        let record = self.new_record(&call, &pod, added.enrollment);
        let record = self.merge_known(&call, record).await?;
        if joins {
            // The record is written and published when the enrollment begins.
            self.set_current(record);
        } else {
            self.record_current(record)?;
        }
        self.failure = None;
        self.timeline.note(format!(
            "sandbox {} created: {} ({})",
            call.sandbox, added.enrollment, added.reason
        ));
        if joins {
            self.enroll_for_caller(&call, permit, caller_gone).await?;
        } else {
            self.reconcile_now().await;
            tracing::info!(
                pod = %added.pod, uid = %added.pod.uid, sandbox = %call.sandbox,
                trace_id = call.trace.id(), enrollment = %added.enrollment,
                reason = %added.reason, "Added",
            );
        }
        Ok(added)
    }

    /// Waits for the ADD's permit; the wait can be cancelled.
    async fn acquire_permit(
        &mut self,
        call: &AddCall,
        caller_gone: Pin<&mut (dyn Future<Output = ()> + Send)>,
    ) -> Result<Permit, Failure> {
        let _waits = call.phases.enter(Phase::Queue);
        let urgent = interrupt::urgent(self.sent.clone(), self.seen);
        let permit = tokio::select! {
            biased;
            () = caller_gone => Err(CancelReason::CallerGone.into()),
            reason = urgent => Err(reason.into()),
            permit = self.shared.admission.acquire(call.work_deadline) => permit,
        };
        self.failure = permit.as_ref().err().cloned();
        permit
    }

    /// Records a sandbox whose decision is unknown. Once decided, the sandbox is enrolled like any other.
    async fn admit_unenrolled(
        &mut self,
        call: &AddCall,
        pod: &Pod,
        why: String,
    ) -> Result<Added, Failure> {
        let added = Added {
            enrollment: Enrollment::Unknown,
            reason: Reason::SourceUnavailable,
            pod: pod.pod.clone(),
        };
        if self.is_additional_interface(&call.sandbox) {
            return Ok(added);
        }
        let record = Record {
            admitted_unenrolled: true,
            ..self.new_record(call, pod, added.enrollment)
        };
        let record = self.merge_known(call, record).await?;
        self.record_current(record)?;
        tracing::warn!(pod = %added.pod, sandbox = %call.sandbox, trace_id = call.trace.id(), why, "Admitted unenrolled");
        self.timeline.note(format!(
            "sandbox {} admitted unenrolled: {why}",
            call.sandbox
        ));
        self.reconcile_now().await;
        // The failure is reported until the source answers.
        if self
            .records
            .last()
            .is_some_and(|record| record.admitted_unenrolled)
        {
            self.failure = Some(Failure::new(Reason::SourceUnavailable, why));
        }
        Ok(added)
    }

    /// Completes the record of a pod admitted unenrolled once the source shows the pod.
    pub(super) fn identify(&mut self) -> Result<(), Failure> {
        let inventory = self.shared.source.inventory();
        let Some(record) = self
            .records
            .last_mut()
            .filter(|known| known.admitted_unenrolled)
        else {
            return Ok(());
        };
        let Some(pod) = inventory
            .pod(&self.key)
            .filter(|pod| record.belongs_to(pod))
        else {
            return Ok(());
        };
        let known = Record {
            pod: pod.pod.clone(),
            service_account: pod.service_account.clone(),
            runtime_uid: pod.runtime_uid.clone(),
            admitted_unenrolled: false,
            redirection: self.shared.redirection_of(pod).unwrap_or_default(),
            ..Record::clone(record)
        };
        self.shared.pipeline.checkpoint.write(&known)?;
        *record = known.into();
        self.failure = None;
        self.timeline
            .note("the source shows the pod that was admitted unenrolled");
        Ok(())
    }

    /// Returns whether the sandbox is another interface of a recorded container. An additional interface changes
    /// nothing, because capture works on the netns.
    pub(super) fn is_additional_interface(&self, sandbox: &SandboxRef) -> bool {
        let same = |record: &Arc<Record>| {
            record.sandbox.container_id == sandbox.container_id && !record.matches_request(sandbox)
        };
        self.records.iter().any(same)
    }

    /// Returns the record with which a sandbox continues. A repeated ADD keeps its record; a different netns replaces
    /// the recorded netns only if the recorded netns has ended.
    async fn merge_known(&self, call: &AddCall, new: Record) -> Result<Record, Failure> {
        let known = self.index_of(&call.sandbox);
        let Some(known) = known.and_then(|index| self.records.get(index)) else {
            return Ok(new);
        };
        if known.has_netns(&call.netns) {
            return Ok(merge_identity(Record::clone(known), new));
        }
        self.replace_sandbox(known).await?;
        Ok(new)
    }

    /// Continues with a sandbox that is added again after its DEL. Runs before any step that can fail: a deletion still
    /// being retried would leave the rules to a netns that lives on.
    fn take_back_delete(&mut self, call: &AddCall) -> Result<(), Failure> {
        let index = self.index_of(&call.sandbox);
        let Some(record) = index.and_then(|index| self.records.get_mut(index)) else {
            return Ok(());
        };
        if !record.has_netns(&call.netns) || !matches!(record.intent, Intent::Deleting { .. }) {
            return Ok(());
        }
        let continued = Record {
            intent: Intent::Enrolling,
            ..Record::clone(record)
        };
        self.shared.pipeline.checkpoint.write(&continued)?;
        *record = continued.into();
        self.timeline.note(format!(
            "sandbox {} was added again after its DEL",
            call.sandbox
        ));
        self.wake_in(POLL_INTERVAL);
        Ok(())
    }

    fn record_current(&mut self, record: Record) -> Result<(), Failure> {
        self.shared.pipeline.checkpoint.write(&record)?;
        self.set_current(record);
        self.publish_view();
        Ok(())
    }

    fn set_current(&mut self, record: Record) {
        self.records.retain(|known| known.sandbox != record.sandbox);
        if self.records.iter().any(|record| record.has_unknown_netns()) {
            // The earlier record is forgotten once the new sandbox is enrolled.
            self.wake_in(POLL_INTERVAL);
        }
        self.records.push(record.into());
    }

    pub(super) fn new_record(&self, call: &AddCall, pod: &Pod, enrollment: Enrollment) -> Record {
        Record {
            sandbox: call.sandbox.clone(),
            pod: pod.pod.clone(),
            service_account: pod.service_account.clone(),
            runtime_uid: pod.runtime_uid.clone(),
            admitted_unenrolled: false,
            // The redirection is determined again when the sandbox is enrolled.
            redirection: self
                .shared
                .redirection_for(pod, enrollment)
                .unwrap_or_default(),
            netns: call.netns.clone(),
            netns_id: None,
            addresses: call.addresses.clone(),
            revision: self.shared.pipeline.revisions.next(),
            intent: Intent::Out,
        }
    }

    /// Forgets a sandbox whose name now belongs to another netns.
    async fn replace_sandbox(&self, known: &Record) -> Result<(), Failure> {
        let pipeline = &self.shared.pipeline;
        if known.intent.has_effects() && pipeline.netns_state(known).await? == NetnsState::InUse {
            let message = format!(
                "sandbox {} still runs in the netns {}",
                known.sandbox,
                known.netns.path.display()
            );
            return Err(Failure::new(Reason::NetnsMismatch, message).at_field("netns"));
        }
        pipeline.forget(known).await
    }

    /// Enrolls the sandbox for a waiting ADD. If the ADD fails, the runtime deletes the sandbox, so the record is not
    /// kept.
    async fn enroll_for_caller(
        &mut self,
        call: &AddCall,
        permit: Option<Permit>,
        caller_gone: Pin<&mut (dyn Future<Output = ()> + Send)>,
    ) -> Result<(), Failure> {
        let urgent = interrupt::urgent(self.sent.clone(), self.seen);
        let mut cancelled = pin!(async {
            tokio::select! {
                () = caller_gone => CancelReason::CallerGone,
                reason = urgent => reason,
            }
        });
        let result = self
            .enroll(EnrollContext {
                deadline: call.deadline,
                work_deadline: call.work_deadline,
                cancelled: cancelled.as_mut(),
                permit,
                phases: call.phases.clone(),
            })
            .await;
        let Err(mut failure) = result else {
            return Ok(());
        };
        let left = failure.undo_failures.clone();
        if let Some(record) = self.records.last_mut().map(Arc::make_mut) {
            if !left.is_empty() {
                // The deletion of the sandbox repeats the failed undo steps.
                record.intent = Intent::Deleting {
                    since: BootInstant::now(),
                };
                let written = self.shared.pipeline.checkpoint.write(record);
                // The task keeps the intent in memory and acts on the intent even if the write failed.
                let unwritten = written.err().map(|error| error.to_string());
                failure.undo_failures.extend(unwritten);
                self.wake_in(POLL_INTERVAL);
            } else if !record.intent.has_effects() {
                let forgotten = self.shared.pipeline.checkpoint.remove(&record.sandbox);
                failure
                    .undo_failures
                    .extend(forgotten.err().map(|error| error.to_string()));
                self.records.pop();
            }
        }
        self.failure = Some(failure.clone());
        Err(failure)
    }
}

/// A placeholder identity never replaces a known one.
fn merge_identity(known: Record, new: Record) -> Record {
    if new.admitted_unenrolled && !known.admitted_unenrolled {
        return known;
    }
    Record {
        pod: new.pod,
        service_account: new.service_account,
        runtime_uid: new.runtime_uid,
        admitted_unenrolled: new.admitted_unenrolled,
        // While the sandbox is enrolled, keep the applied redirection.
        redirection: if known.intent.was_in_mesh() {
            known.redirection
        } else {
            new.redirection
        },
        ..known
    }
}
