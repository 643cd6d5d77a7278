//! Runs each CNI verb against the agent, the spool and the kill switch.

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

/// The time that a DEL keeps back to spool the deletion if the agent fails.
const SPOOL_RESERVE: Duration = Duration::from_millis(500);

pub(crate) fn run(invocation: &Invocation, call: &Call) -> Result<Outcome, CniError> {
    match invocation {
        Invocation::Add(attachment) => {
            let outcome = add(attachment, call)?;
            Ok(outcome.with_stdout(result::pass_through(&attachment.config)))
        }
        Invocation::Check(attachment) => check(attachment, call),
        Invocation::Del(detachment) => Ok(del(detachment, call)),
        Invocation::Gc(collection) => gc(collection, call),
        // STATUS does not ask the agent: a failing STATUS makes the node not ready, so that no pod can start.
        Invocation::Status(_) => Ok(Outcome::skipped("Ready")),
        Invocation::Version(version) => {
            Ok(Outcome::skipped("Reported the supported versions").with_stdout(version.report()))
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
        Ok(_) => Ok(Outcome::done("Added the pod")),
        Err(AgentError::Unreachable(problem)) => {
            let entry = add_entry(attachment, pod, Cause::AgentAway, Some(&netns), addresses);
            add_without_agent(settings, pod, &entry, &problem)
        }
        Err(error) => Err(error.into()),
    }
}

/// Returns the pod, or the outcome of the call if inpod does not handle the pod.
fn pod_in_scope(attachment: &Attachment) -> Result<&NamedPod, Outcome> {
    match &attachment.pod {
        None => Err(Outcome::skipped("Skipped: not for a Kubernetes pod")),
        Some(pod) if attachment.config.settings.excludes(&pod.namespace) => {
            Err(Outcome::skipped("Skipped: excluded namespace"))
        }
        Some(pod) => Ok(pod),
    }
}

/// Inspects the path without opening it, because holding a netns open or blocking on a FIFO would do harm. netconfig
/// verifies that the path leads to a netns.
fn stat_netns(path: &Path) -> Result<NetnsRef, CniError> {
    match fs::metadata(path) {
        Ok(found) => Ok(NetnsRef {
            device: Some(found.dev()),
            inode: Some(found.ino()),
            ..NetnsRef::from_path(path)
        }),
        Err(error) => {
            let missing = error.kind() == io::ErrorKind::NotFound;
            let code = if missing {
                ErrorCode::InvalidEnvironment
            } else {
                ErrorCode::Io
            };
            let msg = format!("CNI_NETNS: cannot stat {}: {error}", path.display());
            Err(CniError::new(code, msg))
        }
    }
}

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
        // Only with a spool entry can pod-events find the pod, so no pod is admitted without an entry.
        Decision::Admit => match entry.write(&settings.state_dir) {
            Ok(()) => Ok(
                Outcome::done("Admitted the pod unenrolled: the agent is unreachable")
                    .with_problem(Level::Warn, problem),
            ),
            Err(error) => Err(wait(error.to_string()).into()),
        },
    }
}

/// Never fails, even on a full disk, because the kill switch must let pods start.
fn admit_disabled(attachment: &Attachment, pod: &NamedPod) -> Outcome {
    let settings = &attachment.config.settings;
    let netns = stat_netns(&attachment.netns).ok();
    let addresses = result::addresses(&attachment.config, &attachment.sandbox.ifname);
    let addresses = addresses.unwrap_or_default();
    let entry = add_entry(attachment, pod, Cause::Disabled, netns.as_ref(), addresses);
    let cause = match entry.write(&settings.state_dir) {
        Ok(()) => format!("the kill switch {} is set", kill_switch_path(settings)),
        Err(error) => format!(
            "the kill switch {} is set; cannot spool the ADD: {error}",
            kill_switch_path(settings)
        ),
    };
    Outcome::done("Admitted the pod unenrolled: inpod is disabled on this node")
        .with_problem(Level::Error, cause)
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
        pod: Some(pod.clone()),
        netns: netns.cloned(),
        addresses,
        ..Entry::new(SpooledVerb::Add, cause, attachment.sandbox.clone())
    }
}

fn check(attachment: &Attachment, call: &Call) -> Result<Outcome, CniError> {
    if let Err(outcome) = pod_in_scope(attachment) {
        return Ok(outcome);
    }
    let settings = &attachment.config.settings;
    if enrolled::is_disabled(&settings.state_dir) {
        return Ok(Outcome::skipped("Skipped: inpod is disabled on this node"));
    }
    let message = CheckPodRequest {
        sandbox: Some((&attachment.sandbox).into()),
    };
    let agent = Agent::new(settings, call, Duration::ZERO);
    agent.send(message, async |client, request| {
        client.check_pod(request).await
    })?;
    Ok(Outcome::done("Checked the pod"))
}

/// Never fails, because the runtime would keep the sandbox and retry until the DEL succeeds.
fn del(detachment: &Detachment, call: &Call) -> Outcome {
    if matches!(detachment.pod, Ok(None)) {
        return Outcome::skipped("Skipped: not for a Kubernetes pod");
    }
    let settings = &detachment.config.settings;
    if enrolled::is_disabled(&settings.state_dir) {
        return spool_deletion(
            detachment,
            Cause::Disabled,
            &format!("the kill switch {} is set", kill_switch_path(settings)),
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
        Ok(_) => Outcome::done("Deleted the pod"),
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

fn spool_deletion(detachment: &Detachment, cause: Cause, problem: &str) -> Outcome {
    let entry = Entry {
        pod: pod_of(detachment).cloned(),
        netns: detachment.netns.as_ref().map(NetnsRef::from_path),
        ..Entry::new(SpooledVerb::Del, cause, detachment.sandbox.clone())
    };
    match entry.write(&detachment.config.settings.state_dir) {
        Ok(()) => Outcome::done("Spooled the deletion").with_problem(Level::Warn, problem),
        // pod-events notices without a report that the netns is gone.
        Err(error) => Outcome::done("Could not report or spool the deletion")
            .with_problem(Level::Error, format!("{problem}; {error}")),
    }
}

fn gc(collection: &Collection, call: &Call) -> Result<Outcome, CniError> {
    let settings = &collection.config.settings;
    if enrolled::is_disabled(&settings.state_dir) {
        return Ok(Outcome::skipped("Skipped: inpod is disabled on this node"));
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
    Ok(Outcome::done("Collected garbage"))
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
