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
    call::Call,
    fallback::{self, Decision},
    output::Outcome,
};

/// What a DEL keeps back of its time to write down what the agent did not take.
const SPOOL_RESERVE: Duration = Duration::from_millis(500);

/// Runs one call.
pub(crate) fn run(invocation: &Invocation, call: &Call) -> Result<Outcome, CniError> {
    match invocation {
        Invocation::Add(attachment) => {
            let outcome = add(attachment, call)?;
            Ok(outcome.with_stdout(result::pass_through(&attachment.config)))
        }
        Invocation::Check(attachment) => check(attachment, call),
        Invocation::Del(detachment) => Ok(del(detachment, call)),
        Invocation::Gc(collection) => gc(collection, call),
        // A failing STATUS makes the runtime not ready, and then nothing can start: that the plugin runs is enough.
        Invocation::Status(_) => Ok(Outcome::skipped("Ready")),
        Invocation::Version(version) => {
            Ok(Outcome::skipped("Versions told").with_stdout(version.report()))
        }
    }
}

fn add(attachment: &Attachment, call: &Call) -> Result<Outcome, CniError> {
    let pod = match pod_in_scope(attachment) {
        Ok(pod) => pod,
        Err(outcome) => return Ok(outcome),
    };
    let settings = &attachment.config.settings;
    if enrolled::is_disabled(&settings.state_dir) {
        return Ok(admit_disabled(attachment, pod));
    }
    let netns = stat_netns(&attachment.netns)?;
    let addresses = result::addresses(&attachment.config, &attachment.sandbox.ifname)?;
    let message = AddPodRequest {
        sandbox: Some((&attachment.sandbox).into()),
        pod: Some(selector(pod)),
        netns: Some((&netns).into()),
        addresses: addresses_to(&addresses),
    };
    let agent = Agent::new(settings, call, Duration::ZERO);
    match agent.send(message, async |client, request| {
        client.add_pod(request).await
    }) {
        Ok(_) => Ok(Outcome::done("Added")),
        Err(AgentError::Unreachable(problem)) => {
            let entry = add_entry(attachment, pod, Cause::AgentAway, Some(&netns), addresses);
            add_without_agent(settings, pod, &entry, &problem)
        }
        Err(error) => Err(error.into()),
    }
}

/// The pod of a call that concerns the mesh; else what the call comes to.
fn pod_in_scope(attachment: &Attachment) -> Result<&NamedPod, Outcome> {
    match &attachment.pod {
        None => Err(Outcome::skipped("Passed: not for a pod of Kubernetes")),
        Some(pod) if attachment.config.settings.excludes(&pod.namespace) => {
            Err(Outcome::skipped("Passed: excluded namespace"))
        }
        Some(pod) => Ok(pod),
    }
}

/// Looks at what stands at the path, without opening it: a plugin that holds a netns, or is stuck on a FIFO, would do
/// harm, and the proof is netconfig's.
fn stat_netns(path: &Path) -> Result<NetnsRef, CniError> {
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
fn add_without_agent(
    settings: &Settings,
    pod: &NamedPod,
    entry: &Entry,
    problem: &str,
) -> Result<Outcome, CniError> {
    let wait = |why: String| AgentError::Unreachable(format!("{problem}; the pod waits: {why}"));
    let enrolled = EnrolledNamespaces::read(&settings.state_dir);
    match fallback::decide(settings.agent_unavailable, enrolled, &pod.namespace) {
        Decision::Wait(why) => Err(wait(why).into()),
        // Whoever is let through must be found again: no entry, no admission.
        Decision::Admit => match entry.write(&settings.state_dir) {
            Ok(()) => {
                Ok(Outcome::done("Admitted without the agent").with_problem(Level::Warn, problem))
            }
            Err(error) => Err(wait(error.to_string()).into()),
        },
    }
}

/// The kill switch is set: nothing may keep a pod from starting, not even a disk that is full.
fn admit_disabled(attachment: &Attachment, pod: &NamedPod) -> Outcome {
    let settings = &attachment.config.settings;
    let netns = stat_netns(&attachment.netns).ok();
    let addresses = result::addresses(&attachment.config, &attachment.sandbox.ifname);
    let addresses = addresses.unwrap_or_default();
    let entry = add_entry(attachment, pod, Cause::Disabled, netns.as_ref(), addresses);
    let cause = match entry.write(&settings.state_dir) {
        Ok(()) => format!("{} is there", kill_switch_path(settings)),
        Err(error) => format!(
            "{} is there; not written down: {error}",
            kill_switch_path(settings)
        ),
    };
    Outcome::done("Admitted: inpod is disabled on this node").with_problem(Level::Error, cause)
}

fn kill_switch_path(settings: &Settings) -> String {
    let path = settings.state_dir.join(enrolled::DISABLED_FILE);
    path.display().to_string()
}

fn add_entry(
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
    if let Err(outcome) = pod_in_scope(attachment) {
        return Ok(outcome);
    }
    let settings = &attachment.config.settings;
    if enrolled::is_disabled(&settings.state_dir) {
        return Ok(Outcome::skipped("Passed: inpod is disabled on this node"));
    }
    let message = CheckPodRequest {
        sandbox: Some((&attachment.sandbox).into()),
    };
    let agent = Agent::new(settings, call, Duration::ZERO);
    agent.send(message, async |client, request| {
        client.check_pod(request).await
    })?;
    Ok(Outcome::done("Checked"))
}

/// Never fails: a DEL that fails keeps the runtime from removing the sandbox, and repeats until it succeeds.
fn del(detachment: &Detachment, call: &Call) -> Outcome {
    if matches!(detachment.pod, Ok(None)) {
        return Outcome::skipped("Passed: not for a pod of Kubernetes");
    }
    let settings = &detachment.config.settings;
    if enrolled::is_disabled(&settings.state_dir) {
        return spool_deletion(
            detachment,
            Cause::Disabled,
            &format!("{} is there", kill_switch_path(settings)),
        );
    }
    let message = DeletePodRequest {
        sandbox: Some((&detachment.sandbox).into()),
        pod: pod_of(detachment).map(selector),
    };
    let agent = Agent::new(settings, call, SPOOL_RESERVE);
    match agent.send(message, async |client, request| {
        client.delete_pod(request).await
    }) {
        Ok(_) => Outcome::done("Deleted"),
        Err(AgentError::Unreachable(problem)) => {
            spool_deletion(detachment, Cause::AgentAway, &problem)
        }
        Err(AgentError::Failed(_, failure)) => {
            spool_deletion(detachment, Cause::AgentFailed, &failure.to_string())
        }
    }
}

fn pod_of(detachment: &Detachment) -> Option<&NamedPod> {
    detachment.pod.as_ref().ok().and_then(Option::as_ref)
}

/// A DEL that the agent did not take.
fn spool_deletion(detachment: &Detachment, cause: Cause, problem: &str) -> Outcome {
    let entry = Entry {
        pod: pod_of(detachment).map(Into::into),
        netns: detachment
            .netns
            .as_ref()
            .map(|path| (&NetnsRef::at(path)).into()),
        ..Entry::new(SpooledVerb::Del, cause, &detachment.sandbox)
    };
    match entry.write(&detachment.config.settings.state_dir) {
        Ok(()) => Outcome::done("Deletion written down").with_problem(Level::Warn, problem),
        // pod-events finds out by itself that the netns is gone.
        Err(error) => Outcome::done("Deletion told to nobody")
            .with_problem(Level::Error, format!("{problem}; {error}")),
    }
}

fn gc(collection: &Collection, call: &Call) -> Result<Outcome, CniError> {
    let settings = &collection.config.settings;
    if enrolled::is_disabled(&settings.state_dir) {
        return Ok(Outcome::skipped("Passed: inpod is disabled on this node"));
    }
    let valid = collection.valid.iter().map(|valid| v1::Attachment {
        container_id: valid.container_id.to_string(),
        ifname: valid.ifname.to_string(),
    });
    let message = CollectGarbageRequest {
        network_name: collection.config.name.to_string(),
        valid_attachments: valid.collect(),
    };
    let agent = Agent::new(settings, call, Duration::ZERO);
    agent.send(message, async |client, request| {
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
