//! A container runtime's ADD.

use std::{
    net::IpAddr,
    pin::{Pin, pin},
    time::Duration,
};

use tokio::time::Instant;
use workload::{Enrollment, Failure, NetnsRef, PodUid, Reason, SandboxRef};

use super::{Added, POLL, Stop, Task, interrupt};
use crate::{
    checkpoint::{Intent, Record},
    moment::Moment,
    pipeline::{Life, Run},
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
        gone: Pin<&mut (dyn Future<Output = ()> + Send)>,
    ) -> Result<Added, Failure> {
        let pod = self.resolve(&call).await?;
        let decision = self.shared.decide(&pod);
        let added = Added {
            enrollment: decision.enrollment,
            reason: decision.reason,
            pod: pod.pod.clone(),
        };
        if added.enrollment == Enrollment::Unknown {
            let message = format!(
                "namespace {} may stand in a manifest that cannot be read",
                pod.pod.namespace
            );
            return Err(Failure::new(decision.reason, message).at_field("pod.namespace"));
        }
        if self.is_further_interface(&call.sandbox) {
            return Ok(added);
        }
        if added.enrollment == Enrollment::Ambient {
            // Before anything is written down: there is nothing to undo.
            self.shared.pipeline.broker()?;
        }
        self.adopt(&call, &pod).await?;
        self.timeline.note(format!(
            "sandbox {} created: {} ({})",
            call.sandbox, added.enrollment, added.reason
        ));
        match added.enrollment {
            Enrollment::Ambient => self.enroll_for(&call, gone).await?,
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
            None => Err(self.unknown()),
        }
    }

    fn unknown(&self) -> Failure {
        let ((namespace, name), node) = (&self.key, &self.shared.config.node_name);
        let unusable = self.shared.source.inventory().unusable.clone();
        let mut message = format!("no pod {namespace}/{name} is known on node {node}");
        if let Some(file) = unusable.first() {
            message = format!("{message}; {} cannot be used", file.display());
        }
        Failure::new(Reason::PodUnknown, message).at_field("pod")
    }

    /// A second network of a container changes nothing: capture is of the netns, not of an interface.
    pub(super) fn is_further_interface(&self, sandbox: &SandboxRef) -> bool {
        let same = |record: &Record| {
            record.sandbox.container_id == sandbox.container_id && record.sandbox != *sandbox
        };
        self.records.iter().any(same)
    }

    /// Makes the sandbox the pod's current one. A repeated call keeps what is known of it; another netns takes its
    /// place only when the one that is known has ended.
    async fn adopt(&mut self, call: &AddCall, pod: &Pod) -> Result<(), Failure> {
        let known = self
            .index_of(&call.sandbox)
            .and_then(|index| self.records.get(index))
            .cloned();
        let record = match known {
            Some(known)
                if known.netns == call.netns
                    && !matches!(known.intent, Intent::Deleting { .. }) =>
            {
                Record {
                    pod: pod.pod.clone(),
                    ..known
                }
            }
            Some(known) => {
                self.make_way(&known, call).await?;
                self.fresh(call, pod)
            }
            None => self.fresh(call, pod),
        };
        self.shared.pipeline.checkpoint.write(&record)?;
        self.records.retain(|known| known.sandbox != record.sandbox);
        self.records.push(record);
        self.show();
        Ok(())
    }

    pub(super) fn fresh(&self, call: &AddCall, pod: &Pod) -> Record {
        Record {
            sandbox: call.sandbox.clone(),
            pod: pod.pod.clone(),
            service_account: pod.service_account.clone(),
            netns: call.netns.clone(),
            netns_id: None,
            addresses: call.addresses.clone(),
            revision: self.shared.pipeline.revisions.next(),
            intent: Intent::Out,
        }
    }

    async fn make_way(&self, known: &Record, call: &AddCall) -> Result<(), Failure> {
        let pipeline = &self.shared.pipeline;
        let another = known.netns != call.netns;
        if another && known.intent.is_held() && pipeline.life(known).await? == Life::Inhabited {
            let message = format!(
                "sandbox {} lives on in the netns {}",
                known.sandbox,
                known.netns.path.display()
            );
            return Err(Failure::new(Reason::NetnsMismatch, message).at_field("netns"));
        }
        pipeline.forget(known).await
    }

    /// Enrols for a caller who waits. If that fails the runtime deletes the sandbox, so nothing of it is kept.
    async fn enroll_for(
        &mut self,
        call: &AddCall,
        gone: Pin<&mut (dyn Future<Output = ()> + Send)>,
    ) -> Result<(), Failure> {
        let firm = interrupt::firm(self.sent.clone(), self.seen);
        let mut stop = pin!(async {
            tokio::select! {
                () = gone => Stop::CallerGone,
                stop = firm => stop,
            }
        });
        let result = self
            .enroll(Run {
                deadline: call.deadline,
                stop: stop.as_mut(),
            })
            .await;
        let Err(mut failure) = result else {
            return Ok(());
        };
        let left = failure.undo_failures.clone();
        if let Some(record) = self.records.last_mut() {
            tracing::warn!(pod = %record.pod, sandbox = %record.sandbox, %failure, undo = ?left, "Refused");
            if !left.is_empty() {
                // What could not be undone now is undone as the end of the sandbox.
                record.intent = Intent::Deleting {
                    since: Moment::now(),
                };
                self.shared.pipeline.checkpoint.write(record)?;
                self.wake_in(POLL);
            } else if !record.intent.is_held() {
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
