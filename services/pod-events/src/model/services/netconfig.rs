use std::pin::Pin;

use futures_util::{Stream, StreamExt as _, stream};
use inpod_proto::{
    netconfig::v1::{
        self as wire, inspect_netns_request, netconfig_service_server::NetconfigService,
        watch_drift_response::Event,
    },
    required,
};
use inpod_types::{Failure, NetnsRef, Reason, SandboxRef};
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Request, Status};

use super::{Answer, Services, disconnected};
use crate::model::node::{
    DriftEvent, Method, Node, Rules, address, index_of, netns_id, sandbox_ref, uid,
};

const FINGERPRINT: &str = "f1";

fn invalid(error: inpod_proto::Invalid) -> Failure {
    error.into()
}

fn sandbox_of(sandbox: Option<inpod_proto::types::v1::SandboxRef>) -> Result<SandboxRef, Status> {
    required("sandbox", sandbox).map_err(|error| inpod_proto::into_status(&invalid(error)))
}

fn describe(event: &DriftEvent) -> wire::WatchDriftResponse {
    let event = match event {
        DriftEvent::State(sandbox, rules) => Event::State(wire::NetnsState {
            sandbox: Some(sandbox.into()),
            netns: index_of(&sandbox.container_id).map(|index| netns_id(index).into()),
            fingerprint: rules.map(|_| FINGERPRINT.to_owned()).unwrap_or_default(),
            intact: *rules == Some(Rules::Complete),
        }),
        DriftEvent::Released(sandbox, index) => Event::ClaimReleased(wire::ClaimReleased {
            sandbox: Some(sandbox.into()),
            netns: Some(netns_id(*index).into()),
        }),
    };
    wire::WatchDriftResponse { event: Some(event) }
}

fn differences(rules: Option<Rules>) -> Vec<String> {
    match rules {
        Some(Rules::Complete) => Vec::new(),
        other => vec![format!("{other:?}")],
    }
}

fn claim(node: &mut Node, sandbox: &SandboxRef, netns: &NetnsRef) -> Result<usize, Failure> {
    let index = node.find_path(netns)?;
    claim_at(node, sandbox, index)?;
    Ok(index)
}

fn claim_at(node: &mut Node, sandbox: &SandboxRef, index: usize) -> Result<(), Failure> {
    if let Some(held) = node
        .netconfig
        .claims
        .get(sandbox)
        .copied()
        .filter(|it| *it != index)
    {
        if node.sandboxes[held].exists() {
            return Err(Failure::new(
                Reason::NetnsMismatch,
                "it holds another netns",
            ));
        }
        node.release(sandbox);
    }
    let mut claims = node.netconfig.claims.iter();
    if claims.any(|(other, held)| *held == index && other != sandbox) {
        return Err(Failure::new(Reason::NetnsInUse, "another sandbox's netns"));
    }
    let is_new = node
        .netconfig
        .claims
        .insert(sandbox.clone(), index)
        .is_none();
    // Confirming a claim sends no state; a new claim sends the state only if the netns has rules.
    if is_new && node.sandboxes[index].rules.is_some() {
        node.send_state(index);
    }
    Ok(())
}

fn find(
    node: &mut Node,
    pod_uid: &str,
    addresses: &[String],
) -> Result<(SandboxRef, usize), Failure> {
    let found = node.sandboxes.iter().enumerate().find(|(index, sandbox)| {
        let is_of_pod = uid(sandbox.pod, sandbox.generation) == pod_uid;
        is_of_pod && sandbox.has_processes() && addresses.contains(&address(*index))
    });
    let Some((index, _)) = found else {
        return Err(Failure::new(Reason::NetnsNotFound, "no process of the pod"));
    };
    let discovered = SandboxRef {
        network_name: inpod_types::NetworkName::default(),
        ..sandbox_ref(index)
    };
    claim_at(node, &discovered, index)?;
    Ok((discovered, index))
}

fn apply(node: &mut Node, sandbox: &SandboxRef, to_sidecar: bool) -> Result<(), Failure> {
    let index = node.claimed(sandbox)?;
    if node.sandboxes[index].sidecar != to_sidecar {
        node.violate(format!("{sandbox} is redirected to another proxy"));
    }
    if !to_sidecar && !node.sandboxes[index].acknowledged {
        node.violate(format!(
            "rules of {sandbox} before ztunnel has acknowledged it"
        ));
    }
    node.sandboxes[index].rules = Some(Rules::Complete);
    node.send_state(index);
    Ok(())
}

fn remove(node: &mut Node, sandbox: &SandboxRef, is_final: bool) -> Result<u32, Failure> {
    let index = node.claimed(sandbox)?;
    if node.is_protected(index) {
        node.violate(format!("{sandbox} lost its rules, which nothing asked for"));
    }
    check_announced(node, index, is_final);
    let it = &node.sandboxes[index];
    if it.sidecar && it.app && it.admitted == Some(true) {
        node.violate(format!("{sandbox} sends past its sidecar in plain text"));
    }
    let flows = node.sandboxes[index].flows;
    let rules = &mut node.sandboxes[index].rules;
    *rules = rules.filter(|_| !is_final).map(|_| Rules::Draining);
    node.send_state(index);
    Ok(flows)
}

/// Checks that the capture of a pod ends only after peers stop seeing the pod as redirected, because peers send HBONE
/// to redirected pods. An uninstall does not wait for an annotation that cannot be withdrawn.
fn check_announced(node: &mut Node, index: usize, is_final: bool) {
    let pod = &node.pods[node.sandboxes[index].pod];
    let drains = !is_final && node.is_shown_alive(index) && node.leave.borrow().is_none();
    if drains && pod.is_announced() {
        node.violate(format!(
            "c{index} leaves the mesh while its peers see it there"
        ));
    }
}

fn inspect(
    node: &Node,
    target: Option<inspect_netns_request::Target>,
) -> Result<wire::InspectNetnsResponse, Failure> {
    use inspect_netns_request::Target;
    let (index, is_claimed) = match target {
        Some(Target::Sandbox(sandbox)) => {
            let sandbox = required("sandbox", Some(sandbox)).map_err(invalid)?;
            (node.claimed(&sandbox)?, true)
        }
        Some(Target::Netns(netns)) => {
            let netns = required("netns", Some(netns)).map_err(invalid)?;
            (node.find_path(&netns)?, false)
        }
        None => return Err(Failure::new(Reason::InvalidField, "no target")),
    };
    let sandbox = &node.sandboxes[index];
    let process = |pid, sandbox_own| wire::Process {
        pid,
        sandbox_own,
        ..wire::Process::default()
    };
    let pause = sandbox.pause.then(|| process(1, is_claimed));
    let app = sandbox.app.then(|| process(2, false));
    Ok(wire::InspectNetnsResponse {
        netns: Some(netns_id(index).into()),
        addresses: vec![address(index)],
        processes: pause.into_iter().chain(app).collect(),
        captured_flows: sandbox.flows,
        path_intact: sandbox.is_mounted,
        ..wire::InspectNetnsResponse::default()
    })
}

fn findings(
    node: &Node,
    target: Option<inspect_netns_request::Target>,
) -> Result<wire::InspectNetnsResponse, Failure> {
    let Some(inspect_netns_request::Target::Sandbox(sandbox)) = target else {
        return Err(Failure::new(Reason::InvalidField, "no sandbox"));
    };
    let sandbox = required("sandbox", Some(sandbox)).map_err(invalid)?;
    let index = node.claimed(&sandbox)?;
    let listens = node.is_served(index) && !node.sandboxes[index].listeners_lost;
    let missing = |port: u16| wire::Finding {
        kind: wire::FindingKind::ListenerMissing.into(),
        subject: format!("TCP port {port}"),
        sentence: format!("ztunnel does not listen on TCP port {port}."),
        blocks: true,
    };
    let missing = [15001, 15006, 15008].map(missing).into_iter();
    Ok(wire::InspectNetnsResponse {
        findings: missing.filter(|_| !listens).collect(),
        ..wire::InspectNetnsResponse::default()
    })
}

#[tonic::async_trait]
impl NetconfigService for Services {
    async fn claim_netns(
        &self,
        request: Request<wire::ClaimNetnsRequest>,
    ) -> Answer<wire::ClaimNetnsResponse> {
        let request = request.into_inner();
        let sandbox = sandbox_of(request.sandbox)?;
        let about = Some(sandbox.clone());
        self.call(Method::Claim, about, move |node| {
            let netns = required("netns", request.netns).map_err(invalid)?;
            let index = claim(node, &sandbox, &netns)?;
            Ok(wire::ClaimNetnsResponse {
                netns: Some(netns_id(index).into()),
                addresses: vec![address(index)],
                ..wire::ClaimNetnsResponse::default()
            })
        })
        .await
    }

    async fn release_netns(
        &self,
        request: Request<wire::ReleaseNetnsRequest>,
    ) -> Answer<wire::ReleaseNetnsResponse> {
        let sandbox = sandbox_of(request.into_inner().sandbox)?;
        let about = Some(sandbox.clone());
        self.call(Method::Release, about, move |node| {
            if node
                .claimed(&sandbox)
                .is_ok_and(|index| node.is_protected(index))
            {
                node.violate(format!("{sandbox} lost its claim, which nothing asked for"));
            }
            let released = node.release(&sandbox);
            Ok(wire::ReleaseNetnsResponse {
                released,
                ..wire::ReleaseNetnsResponse::default()
            })
        })
        .await
    }

    async fn list_claims(
        &self,
        _: Request<wire::ListClaimsRequest>,
    ) -> Answer<wire::ListClaimsResponse> {
        self.call(Method::ListClaims, None, |node| {
            let claim = |(sandbox, index): (&SandboxRef, &usize)| wire::Claim {
                sandbox: Some(sandbox.into()),
                netns: Some(netns_id(*index).into()),
                ..wire::Claim::default()
            };
            Ok(wire::ListClaimsResponse {
                claims: node.netconfig.claims.iter().map(claim).collect(),
                ..wire::ListClaimsResponse::default()
            })
        })
        .await
    }

    async fn find_netns(
        &self,
        request: Request<wire::FindNetnsRequest>,
    ) -> Answer<wire::FindNetnsResponse> {
        let request = request.into_inner();
        self.call(Method::Find, None, move |node| {
            let (sandbox, index) = find(node, &request.pod_uid, &request.addresses)?;
            Ok(wire::FindNetnsResponse {
                sandbox: Some((&sandbox).into()),
                netns: Some(netns_id(index).into()),
                path: node.sandboxes[index].path.display().to_string(),
                ..wire::FindNetnsResponse::default()
            })
        })
        .await
    }

    async fn apply_rules(
        &self,
        request: Request<wire::ApplyRulesRequest>,
    ) -> Answer<wire::ApplyRulesResponse> {
        let request = request.into_inner();
        let mode = request.redirection.and_then(|it| it.mode);
        let to_sidecar = matches!(mode, Some(wire::redirection::Mode::Sidecar(_)));
        let sandbox = sandbox_of(request.sandbox)?;
        let about = Some(sandbox.clone());
        self.call(Method::Apply, about, move |node| {
            apply(node, &sandbox, to_sidecar)?;
            Ok(wire::ApplyRulesResponse {
                fingerprint: FINGERPRINT.to_owned(),
                ..wire::ApplyRulesResponse::default()
            })
        })
        .await
    }

    async fn verify_rules(
        &self,
        request: Request<wire::VerifyRulesRequest>,
    ) -> Answer<wire::VerifyRulesResponse> {
        let sandbox = sandbox_of(request.into_inner().sandbox)?;
        let about = Some(sandbox.clone());
        self.call(Method::Verify, about, move |node| {
            let rules = node.sandboxes[node.claimed(&sandbox)?].rules;
            Ok(wire::VerifyRulesResponse {
                fingerprint: rules.map(|_| FINGERPRINT.to_owned()).unwrap_or_default(),
                differences: differences(rules),
                ..wire::VerifyRulesResponse::default()
            })
        })
        .await
    }

    async fn remove_rules(
        &self,
        request: Request<wire::RemoveRulesRequest>,
    ) -> Answer<wire::RemoveRulesResponse> {
        let request = request.into_inner();
        let is_final = request.phase() == wire::RemovePhase::Final;
        let sandbox = sandbox_of(request.sandbox)?;
        let about = Some(sandbox.clone());
        self.call(Method::RemoveRules, about, move |node| {
            Ok(wire::RemoveRulesResponse {
                captured_flows: remove(node, &sandbox, is_final)?,
                ..wire::RemoveRulesResponse::default()
            })
        })
        .await
    }

    async fn inspect_netns(
        &self,
        request: Request<wire::InspectNetnsRequest>,
    ) -> Answer<wire::InspectNetnsResponse> {
        let request = request.into_inner();
        if request.findings_only {
            let find = move |node: &mut _| findings(node, request.target);
            return self.call(Method::Listeners, None, find).await;
        }
        let is_full = !request.processes_only && !request.captured_flows_only;
        self.call(Method::Inspect, None, move |node| {
            node.inspections += u64::from(is_full);
            inspect(node, request.target)
        })
        .await
    }

    async fn list_listeners(
        &self,
        _: Request<wire::ListListenersRequest>,
    ) -> Answer<wire::ListListenersResponse> {
        Err(Status::unimplemented("no task lists sockets"))
    }

    type WatchDriftStream =
        Pin<Box<dyn Stream<Item = Result<wire::WatchDriftResponse, Status>> + Send>>;

    async fn watch_drift(
        &self,
        _: Request<wire::WatchDriftRequest>,
    ) -> Answer<Self::WatchDriftStream> {
        let (is_up, _) = self.is_up(Method::Claim);
        if !is_up {
            return Err(disconnected());
        }
        let mut node = self.0.lock();
        let (sender, events) = mpsc::unbounded_channel();
        for (sandbox, index) in &node.netconfig.claims {
            let state = DriftEvent::State(sandbox.clone(), node.sandboxes[*index].rules);
            sender.send(state).unwrap();
        }
        node.netconfig.watchers.push(sender);
        let instance = node.netconfig.instance.borrow().to_string();
        let first = wire::WatchDriftResponse {
            event: Some(Event::InstanceId(instance)),
        };
        let events = UnboundedReceiverStream::new(events).map(|event| Ok(describe(&event)));
        let stream = stream::iter([Ok(first)]).chain(events);
        Ok(tonic::Response::new(Box::pin(stream)))
    }

    async fn plan_rules(
        &self,
        _: Request<wire::PlanRulesRequest>,
    ) -> Answer<wire::PlanRulesResponse> {
        Err(Status::unimplemented("no part of the model"))
    }

    async fn self_test(&self, _: Request<wire::SelfTestRequest>) -> Answer<wire::SelfTestResponse> {
        Err(Status::unimplemented("no part of the model"))
    }

    async fn leave_node(
        &self,
        _: Request<wire::LeaveNodeRequest>,
    ) -> Answer<wire::LeaveNodeResponse> {
        Err(Status::unimplemented("no part of the model"))
    }
}
