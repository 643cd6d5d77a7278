//! Gathers facts about pods, ztunnels and rules by calling the services.

use std::time::Duration;

use inpod_proto::{
    netconfig::v1::{
        InspectNetnsRequest, NetnsState, SelfTestCheck, SelfTestRequest, SelfTestResponse,
        WatchDriftRequest, inspect_netns_request::Target, watch_drift_response::Event,
    },
    podevents::v1::{GetStatusRequest, GetStatusResponse, ListPodsRequest, PodSummary},
    types::v1::SandboxRef,
    ztunnelbroker::v1::{ListWorkloadsRequest, ListWorkloadsResponse},
};
use inpod_types::{Failure, Reason};
use tokio::time::{Instant, timeout};
use tonic::Request;

use super::{super::facts::Findings, QUERY_TIMEOUT};
use crate::{
    error::CommandError,
    host_fs::Observed,
    node::{Broker, NETCONFIG, Netconfig, Node, PodEvents, ServiceClient as _},
};

const MAX_INSPECTED_NETNS: usize = 500;
const INSPECT_TIMEOUT: Duration = Duration::from_secs(10);

const SELF_TEST_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(super) struct Answers {
    pub(super) status: Observed<GetStatusResponse>,
    pub(super) pods: Observed<Vec<PodSummary>>,
    pub(super) workloads: Observed<ListWorkloadsResponse>,
    pub(super) states: Observed<Vec<NetnsState>>,
    pub(super) findings: Observed<Findings>,
    pub(super) self_test: Option<Observed<SelfTestResponse>>,
}

/// Calls the services; calls that do not depend on each other run concurrently.
pub(super) async fn all(node: &Node, with_self_test: bool) -> Answers {
    let (status, pods, workloads, states) =
        tokio::join!(status(node), pods(node), workloads(node), states(node));
    let findings = match &states {
        Ok(states) => findings(node, states).await,
        Err(why) => Err(why.clone()),
    };
    let self_test = if with_self_test {
        Some(self_test(node).await)
    } else {
        None
    };
    Answers {
        status,
        pods,
        workloads,
        states,
        findings,
        self_test,
    }
}

async fn status(node: &Node) -> Observed<GetStatusResponse> {
    let answer = node.ask(GetStatusRequest {}, PodEvents::get_status).await;
    answer.map_err(|error| error.first_line())
}

async fn pods(node: &Node) -> Observed<Vec<PodSummary>> {
    let answer = node
        .ask(ListPodsRequest::default(), PodEvents::list_pods)
        .await;
    answer
        .map(|answer| answer.pods)
        .map_err(|error| error.first_line())
}

async fn workloads(node: &Node) -> Observed<ListWorkloadsResponse> {
    let answer = node
        .ask(ListWorkloadsRequest {}, Broker::list_workloads)
        .await;
    answer.map_err(|error| error.first_line())
}

/// Reads the initial states of the stream, within the timeout.
async fn states(node: &Node) -> Observed<Vec<NetnsState>> {
    let read = timeout(QUERY_TIMEOUT, read_states(node)).await;
    read.unwrap_or_else(|_elapsed| {
        Err(format!(
            "netconfig: no answer within {} s",
            QUERY_TIMEOUT.as_secs()
        ))
    })
}

async fn read_states(node: &Node) -> Observed<Vec<NetnsState>> {
    let mut client = Netconfig::connect(node);
    // The request has no timeout of its own, because the timeout would apply to the whole stream.
    let answer = client.watch_drift(Request::new(WatchDriftRequest {}));
    let stream = node.answer(NETCONFIG, answer).await;
    let mut stream = stream.map_err(|error| error.first_line())?;
    let mut states = Vec::new();
    loop {
        let response = stream.message().await;
        let response = response.map_err(|status| node.error(NETCONFIG, &status).first_line())?;
        match response.and_then(|response| response.event) {
            Some(Event::State(state)) => {
                // A state that changes meanwhile is sent again.
                states.retain(|known: &NetnsState| known.sandbox != state.sandbox);
                states.push(state);
            }
            Some(Event::StateComplete(_)) => return Ok(states),
            Some(Event::InstanceId(_) | Event::ClaimReleased(_) | Event::NodeRepaired(_)) => {}
            None => return Err("netconfig ended the stream".to_owned()),
        }
    }
}

async fn findings(node: &Node, states: &[NetnsState]) -> Observed<Findings> {
    let deadline = Instant::now() + INSPECT_TIMEOUT;
    let mut findings = Findings::default();
    let sandboxes = states.iter().filter_map(|state| state.sandbox.as_ref());
    for sandbox in sandboxes.take(MAX_INSPECTED_NETNS) {
        if Instant::now() >= deadline {
            break;
        }
        // A pod that ended meanwhile has no network namespace to inspect, and is not counted.
        if let Some(of) = inspected(node, sandbox).await? {
            let of = of
                .into_iter()
                .map(|finding| (sandbox.container_id.clone(), finding));
            findings.of.extend(of);
            findings.inspected += 1;
        }
    }
    Ok(findings)
}

async fn inspected(
    node: &Node,
    sandbox: &SandboxRef,
) -> Observed<Option<Vec<inpod_proto::netconfig::v1::Finding>>> {
    let request = InspectNetnsRequest {
        target: Some(Target::Sandbox(sandbox.clone())),
        ..InspectNetnsRequest::default()
    };
    match node.ask(request, Netconfig::inspect_netns).await {
        Ok(answer) => Ok(Some(answer.findings)),
        Err(error) if error.is_failure() => Ok(None),
        Err(error) => Err(error.first_line()),
    }
}

async fn self_test(node: &Node) -> Observed<SelfTestResponse> {
    let node = node.with_timeout(SELF_TEST_TIMEOUT);
    match node.ask(SelfTestRequest {}, Netconfig::self_test).await {
        Err(CommandError::Failed { failure, .. }) if is_of_rules(failure.reason) => {
            Ok(refused(&failure))
        }
        answer => answer.map_err(|error| error.first_line()),
    }
}

/// Returns whether the reason means that no rules can be written on this node.
fn is_of_rules(reason: Reason) -> bool {
    reason == Reason::KernelRefused
}

/// Converts the failure of a self-test that could not send traffic into a failed check.
fn refused(failure: &Failure) -> SelfTestResponse {
    SelfTestResponse {
        checks: vec![SelfTestCheck {
            name: "rules".to_owned(),
            passed: false,
            evidence: failure.to_string(),
        }],
        ..SelfTestResponse::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_self_test_that_is_refused_has_failed_and_one_that_is_not_answered_has_not() {
        for (reason, is_told) in [
            (Reason::KernelRefused, true),
            (Reason::CallerRefused, false),
            (Reason::Overloaded, false),
        ] {
            assert_eq!(is_of_rules(reason), is_told, "{reason}");
        }
        let response = refused(&Failure::new(
            Reason::KernelRefused,
            "cannot write".to_owned(),
        ));
        assert!(!response.passed && !response.checks[0].passed);
        let evidence = &response.checks[0].evidence;
        assert!(evidence.contains("cannot write"), "{evidence}");
    }
}
