//! What each verb does.

use std::{fs, io, net::IpAddr, os::unix::fs::MetadataExt as _, path::Path, time::Duration};

use inpod_cni::{
    args::NamedPod,
    config::{Level, Settings},
    enrolled::{self, EnrolledNamespaces},
    error::{CniError, ErrorCode},
    invocation::{Attachment, Collection, Detachment, Invocation},
    result,
    spool::{Cause, Entry, SpooledVerb},
};
use inpod_proto::{
    addresses_to,
    podevents::v1::{
        self, AddPodRequest, CheckPodRequest, CollectGarbageRequest, DeletePodRequest,
    },
    types::v1::PodSelector,
};
use inpod_types::NetnsRef;

use crate::{
    agent::{Agent, AgentError},
    away::{self, Verdict},
    call::Call,
    output::Outcome,
};

/// What a DEL keeps back of its time to write down what the agent did not take.
const SPOOL_RESERVE: Duration = Duration::from_millis(500);

/// Runs one call.
pub(crate) fn run(invocation: &Invocation, call: &Call) -> Result<Outcome, CniError> {
    match invocation {
        Invocation::Add(attachment) => {
            let outcome = add(attachment, call)?;
            Ok(outcome.printing(result::passed_on(&attachment.config)))
        }
        Invocation::Check(attachment) => check(attachment, call),
        Invocation::Del(detachment) => Ok(del(detachment, call)),
        Invocation::Gc(collection) => gc(collection, call),
        // A failing STATUS makes the runtime not ready, and then nothing can start: that the plugin runs is enough.
        Invocation::Status(_) => Ok(Outcome::passed("Ready")),
        Invocation::Version(version) => {
            Ok(Outcome::passed("Versions told").printing(version.report()))
        }
    }
}

fn add(attachment: &Attachment, call: &Call) -> Result<Outcome, CniError> {
    let pod = match concerned(attachment) {
        Ok(pod) => pod,
        Err(outcome) => return Ok(outcome),
    };
    let settings = &attachment.config.settings;
    if enrolled::is_disabled(&settings.state_dir) {
        return Ok(let_through(attachment, pod));
    }
    let netns = observe(&attachment.netns)?;
    let addresses = result::addresses(&attachment.config, &attachment.sandbox.ifname)?;
    let question = AddPodRequest {
        sandbox: Some((&attachment.sandbox).into()),
        pod: Some(selector(pod)),
        netns: Some((&netns).into()),
        addresses: addresses_to(&addresses),
    };
    let agent = Agent::of(settings, call, Duration::ZERO);
    match agent.ask(question, async |client, request| {
        client.add_pod(request).await
    }) {
        Ok(_) => Ok(Outcome::done("Added")),
        Err(AgentError::Away(problem)) => {
            let entry = entry_of(attachment, pod, Cause::AgentAway, Some(&netns), addresses);
            without_agent(settings, pod, &entry, &problem)
        }
        Err(error) => Err(error.into()),
    }
}

/// The pod of a call that concerns the mesh; else what the call comes to.
fn concerned(attachment: &Attachment) -> Result<&NamedPod, Outcome> {
    match &attachment.pod {
        None => Err(Outcome::passed("Passed: not for a pod of Kubernetes")),
        Some(pod) if attachment.config.settings.excludes(&pod.namespace) => {
            Err(Outcome::passed("Passed: excluded namespace"))
        }
        Some(pod) => Ok(pod),
    }
}

/// Looks at what stands at the path, without opening it: a plugin that holds a netns, or is stuck on a FIFO, would do
/// harm, and the proof is netconfig's.
fn observe(path: &Path) -> Result<NetnsRef, CniError> {
    match fs::metadata(path) {
        Ok(found) => Ok(NetnsRef {
            device: Some(found.dev()),
            inode: Some(found.ino()),
            ..NetnsRef::at(path)
        }),
        Err(error) => {
            let missing = error.kind() == io::ErrorKind::NotFound;
            let code = if missing {
                ErrorCode::InvalidEnvironment
            } else {
                ErrorCode::Io
            };
            let msg = format!("CNI_NETNS: cannot look at {}: {error}", path.display());
            Err(CniError::new(code, msg))
        }
    }
}

/// An ADD that the agent cannot be told of.
fn without_agent(
    settings: &Settings,
    pod: &NamedPod,
    entry: &Entry,
    problem: &str,
) -> Result<Outcome, CniError> {
    let wait = |why: String| AgentError::Away(format!("{problem}; the pod waits: {why}"));
    let enrolled = EnrolledNamespaces::read(&settings.state_dir);
    match away::verdict(settings.agent_unavailable, enrolled, &pod.namespace) {
        Verdict::Wait(why) => Err(wait(why).into()),
        // Whoever is let through must be found again: no entry, no admission.
        Verdict::Admit => match entry.write(&settings.state_dir) {
            Ok(()) => Ok(Outcome::done("Admitted without the agent").despite(Level::Warn, problem)),
            Err(error) => Err(wait(error.to_string()).into()),
        },
    }
}

/// The kill switch is set: nothing may keep a pod from starting, not even a disk that is full.
fn let_through(attachment: &Attachment, pod: &NamedPod) -> Outcome {
    let settings = &attachment.config.settings;
    let netns = observe(&attachment.netns).ok();
    let addresses = result::addresses(&attachment.config, &attachment.sandbox.ifname);
    let addresses = addresses.unwrap_or_default();
    let entry = entry_of(attachment, pod, Cause::Disabled, netns.as_ref(), addresses);
    let cause = match entry.write(&settings.state_dir) {
        Ok(()) => format!("{} is there", switch(settings)),
        Err(error) => format!("{} is there; not written down: {error}", switch(settings)),
    };
    Outcome::done("Admitted: inpod is disabled on this node").despite(Level::Error, cause)
}

fn switch(settings: &Settings) -> String {
    let path = settings.state_dir.join(enrolled::DISABLED_FILE);
    path.display().to_string()
}

fn entry_of(
    attachment: &Attachment,
    pod: &NamedPod,
    cause: Cause,
    netns: Option<&NetnsRef>,
    addresses: Vec<IpAddr>,
) -> Entry {
    Entry {
        pod: Some(pod.into()),
        netns: netns.map(Into::into),
        addresses,
        ..Entry::new(SpooledVerb::Add, cause, &attachment.sandbox)
    }
}

fn check(attachment: &Attachment, call: &Call) -> Result<Outcome, CniError> {
    if let Err(outcome) = concerned(attachment) {
        return Ok(outcome);
    }
    let settings = &attachment.config.settings;
    if enrolled::is_disabled(&settings.state_dir) {
        return Ok(Outcome::passed("Passed: inpod is disabled on this node"));
    }
    let question = CheckPodRequest {
        sandbox: Some((&attachment.sandbox).into()),
    };
    let agent = Agent::of(settings, call, Duration::ZERO);
    agent.ask(question, async |client, request| {
        client.check_pod(request).await
    })?;
    Ok(Outcome::done("Checked"))
}

/// Never fails: a DEL that fails keeps the runtime from removing the sandbox, and repeats until it succeeds.
fn del(detachment: &Detachment, call: &Call) -> Outcome {
    if matches!(detachment.pod, Ok(None)) {
        return Outcome::passed("Passed: not for a pod of Kubernetes");
    }
    let settings = &detachment.config.settings;
    if enrolled::is_disabled(&settings.state_dir) {
        return written_down(
            detachment,
            Cause::Disabled,
            &format!("{} is there", switch(settings)),
        );
    }
    let question = DeletePodRequest {
        sandbox: Some((&detachment.sandbox).into()),
        pod: pod_of(detachment).map(selector),
    };
    let agent = Agent::of(settings, call, SPOOL_RESERVE);
    match agent.ask(question, async |client, request| {
        client.delete_pod(request).await
    }) {
        Ok(_) => Outcome::done("Deleted"),
        Err(AgentError::Away(problem)) => written_down(detachment, Cause::AgentAway, &problem),
        Err(AgentError::Failed(_, failure)) => {
            written_down(detachment, Cause::AgentFailed, &failure.to_string())
        }
    }
}

fn pod_of(detachment: &Detachment) -> Option<&NamedPod> {
    detachment.pod.as_ref().ok().and_then(Option::as_ref)
}

/// A DEL that the agent did not take.
fn written_down(detachment: &Detachment, cause: Cause, problem: &str) -> Outcome {
    let entry = Entry {
        pod: pod_of(detachment).map(Into::into),
        netns: detachment
            .netns
            .as_ref()
            .map(|path| (&NetnsRef::at(path)).into()),
        ..Entry::new(SpooledVerb::Del, cause, &detachment.sandbox)
    };
    match entry.write(&detachment.config.settings.state_dir) {
        Ok(()) => Outcome::done("Deletion written down").despite(Level::Warn, problem),
        // pod-events finds out by itself that the netns is gone.
        Err(error) => Outcome::done("Deletion told to nobody")
            .despite(Level::Error, format!("{problem}; {error}")),
    }
}

fn gc(collection: &Collection, call: &Call) -> Result<Outcome, CniError> {
    let settings = &collection.config.settings;
    if enrolled::is_disabled(&settings.state_dir) {
        return Ok(Outcome::passed("Passed: inpod is disabled on this node"));
    }
    let valid = collection.valid.iter().map(|valid| v1::Attachment {
        container_id: valid.container_id.to_string(),
        ifname: valid.ifname.to_string(),
    });
    let question = CollectGarbageRequest {
        network_name: collection.config.name.to_string(),
        valid_attachments: valid.collect(),
    };
    let agent = Agent::of(settings, call, Duration::ZERO);
    agent.ask(question, async |client, request| {
        client.collect_garbage(request).await
    })?;
    Ok(Outcome::done("Garbage collected"))
}

fn selector(pod: &NamedPod) -> PodSelector {
    PodSelector {
        namespace: pod.namespace.to_string(),
        name: pod.name.to_string(),
        uid: pod
            .uid
            .as_ref()
            .map(ToString::to_string)
            .unwrap_or_default(),
    }
}
