//! A container runtime's ADD.

use std::{net::IpAddr, sync::Arc, time::Duration};

use tokio::{sync::oneshot, time::Instant};
use workload::{Enrollment, Failure, NetnsRef, PodUid, Reason, SandboxRef};

use super::{Added, Task};
use crate::{
    checkpoint::{Intent, Record},
    pipeline::Caller,
    pod::Pod,
};

/// How long a pod that is not known yet may take to show in the source.
const SHOW: Duration = Duration::from_secs(2);

/// What a runtime says of a sandbox that it created.
#[derive(Clone, Debug)]
pub struct AddCall {
    /// The sandbox.
    pub sandbox: SandboxRef,
    /// The pod's UID, where the runtime said it.
    pub uid: Option<PodUid>,
    /// The netns as the plugin saw it.
    pub netns: NetnsRef,
    /// The addresses that the chain gave the pod.
    pub addresses: Vec<IpAddr>,
    /// When the caller stops waiting.
    pub deadline: Instant,
}

impl Task {
    /// Decides, and puts the sandbox in place if it is to be in the mesh. What an ADD cannot finish it leaves undone.
    pub(super) async fn add(
        &mut self,
        call: AddCall,
        reply: &oneshot::Sender<Result<Added, Failure>>,
    ) -> Result<Added, Failure> {
        let pod = self.resolve(&call).await?;
        let decision = self.shared.decide(&pod);
        let added = Added {
            enrollment: decision.enrollment,
            reason: decision.reason,
            pod: pod.pod.clone(),
        };
        if self.is_further_interface(&call.sandbox) {
            return Ok(added);
        }
        self.adopt(&call, &pod)?;
        self.timeline.note(format!(
            "sandbox {} created: {} ({})",
            call.sandbox, added.enrollment, added.reason
        ));
        match added.enrollment {
            Enrollment::Ambient => self.enroll_for(&call, reply).await?,
            Enrollment::None | Enrollment::Sidecar | Enrollment::Unknown => self.look_now().await,
        }
        tracing::info!(
            pod = %added.pod, uid = %added.pod.uid, sandbox = %call.sandbox,
            enrollment = %added.enrollment, reason = %added.reason, "Added",
        );
        Ok(added)
    }

    /// The pod that a call means: of its name, of this node, of the UID where one was said.
    async fn resolve(&self, call: &AddCall) -> Result<Pod, Failure> {
        let source = &self.shared.source;
        let find = || source.inventory().pod(&self.key).cloned();
        let fits = |pod: &Pod| call.uid.as_ref().is_none_or(|uid| pod.pod.uid == *uid);
        if let Some(pod) = find().filter(fits) {
            return Ok(pod);
        }
        source
            .refresh(SHOW.min(call.deadline.saturating_duration_since(Instant::now())))
            .await;
        let (namespace, name) = &self.key;
        match find() {
            Some(pod) if fits(&pod) => Ok(pod),
            Some(pod) => {
                let message = format!(
                    "pod {namespace}/{name} has UID {}, not the one the runtime named",
                    pod.pod.uid
                );
                Err(Failure::new(Reason::PodUidMismatch, message).at_field("pod.uid"))
            }
            None => {
                let node = &self.shared.config.node_name;
                let message = format!("no pod {namespace}/{name} is known on node {node}");
                Err(Failure::new(Reason::PodUnknown, message).at_field("pod"))
            }
        }
    }

    /// A second network of a container changes nothing: capture is of the netns, not of an interface.
    fn is_further_interface(&self, sandbox: &SandboxRef) -> bool {
        let same = |record: &Record| {
            record.sandbox.container_id == sandbox.container_id && record.sandbox != *sandbox
        };
        self.records.iter().any(same)
    }

    /// Makes the sandbox the pod's current one. A repeated call keeps what is known of it.
    fn adopt(&mut self, call: &AddCall, pod: &Pod) -> Result<(), Failure> {
        let known = self
            .index_of(&call.sandbox)
            .map(|index| self.records.remove(index));
        let record = match known {
            // What is there already stands, unless its end was announced or it is of another netns.
            Some(known)
                if known.netns == call.netns
                    && !matches!(known.intent, Intent::Deleting { .. }) =>
            {
                Record {
                    pod: pod.pod.clone(),
                    ..known
                }
            }
            Some(_) | None => Record {
                sandbox: call.sandbox.clone(),
                pod: pod.pod.clone(),
                service_account: pod.service_account.clone(),
                netns: call.netns.clone(),
                netns_id: None,
                addresses: call.addresses.clone(),
                revision: self.shared.pipeline.revisions.next(),
                intent: Intent::Out,
            },
        };
        let written = self.shared.pipeline.checkpoint.write(&record);
        self.records.push(record);
        self.show();
        Ok(written?)
    }

    /// Enrols for a caller who waits. If that fails the runtime deletes the sandbox, so nothing of it is kept.
    async fn enroll_for(
        &mut self,
        call: &AddCall,
        reply: &oneshot::Sender<Result<Added, Failure>>,
    ) -> Result<(), Failure> {
        let shared = Arc::clone(&self.shared);
        let Some(record) = self.records.last_mut() else {
            return Ok(());
        };
        let caller = Caller {
            deadline: call.deadline,
            gone: &|| reply.is_closed(),
        };
        let Err(mut failure) = shared
            .pipeline
            .enroll(record, &mut self.timeline, caller)
            .await
        else {
            self.failure = None;
            return Ok(());
        };
        tracing::warn!(pod = %record.pod, sandbox = %record.sandbox, %failure, undo = ?failure.undo_failures, "Refused");
        if matches!(record.intent, Intent::Out) && failure.undo_failures.is_empty() {
            let forgotten = shared
                .pipeline
                .checkpoint
                .remove(&record.sandbox)
                .map_err(Failure::from);
            failure
                .undo_failures
                .extend(forgotten.err().map(|failure| failure.to_string()));
            self.records.pop();
        } else if !failure.undo_failures.is_empty() {
            // What could not be undone now is undone as the end of the sandbox.
            record.intent = Intent::Deleting {
                since: std::time::SystemTime::now(),
            };
            shared
                .pipeline
                .checkpoint
                .write(record)
                .unwrap_or_else(|error| tracing::error!(%error, "Cannot write"));
            self.wake_in(super::POLL);
        }
        self.failure = Some(failure.clone());
        Err(failure)
    }
}
