//! The parts of a bundle. The most useful parts come first, because the limits of time and size apply to the bundle as
//! a whole.

use inpod_proto::{
    netconfig::v1::{
        InspectNetnsRequest, ListClaimsRequest, ListListenersRequest, inspect_netns_request,
        list_listeners_request,
    },
    podevents::v1::{ExplainPodRequest, GetStatusRequest, ListPodsRequest},
    types::v1::{PodSelector, SandboxRef},
    ztunnelbroker::v1::ListWorkloadsRequest,
};

use super::archive::Archive;
use crate::{
    arguments::HostOptions,
    doctor,
    error::CommandError,
    host_fs::Observed,
    json,
    node::{Broker, Netconfig, Node, PodEvents},
};

/// The most pods, and the most network namespaces, to describe separately.
const MAX_ITEMS: usize = 500;

pub(super) async fn add_all(
    node: &Node,
    host: &HostOptions,
    to: &mut Archive,
) -> Result<(), CommandError> {
    let asking = node.with_timeout(doctor::QUERY_TIMEOUT);
    let node = &asking;
    let report = async { Ok(doctor::as_json(node, host).await) };
    to.add("doctor.json", report).await?;
    pods(node, to).await?;
    netns(node, to).await?;
    broker(node, to).await?;
    let is_here = |service: &&str| node.socket(service).exists();
    let optional = doctor::OPTIONAL_SERVICES.into_iter().filter(is_here);
    for service in doctor::SERVICES.into_iter().chain(optional) {
        let name = format!("metrics/{service}.txt");
        to.add(&name, doctor::metrics(node, service)).await?;
    }
    Ok(())
}

fn pretty(message: &impl prost::Message, name: &str) -> Observed<String> {
    json::pretty(message, name).map_err(|error| error.to_string())
}

/// Renders the answer of a service.
async fn describe<T: prost::Message>(
    answer: impl Future<Output = Result<T, CommandError>>,
    name: &str,
) -> Observed<String> {
    let answer = answer.await.map_err(|error| error.first_line())?;
    pretty(&answer, name)
}

async fn pods(node: &Node, to: &mut Archive) -> Result<(), CommandError> {
    let status = node.ask(GetStatusRequest {}, PodEvents::get_status);
    let status = describe(status, "GetStatusResponse");
    to.add("status.json", status).await?;
    let pods = node.ask(ListPodsRequest::default(), PodEvents::list_pods);
    let pods = match pods.await {
        Ok(pods) => pods,
        Err(error) => {
            to.list_missing("pods.json", &error.first_line());
            return Ok(());
        }
    };
    to.add("pods.json", async { pretty(&pods, "ListPodsResponse") })
        .await?;
    let pods = pods.pods.iter().filter_map(|pod| pod.pod.clone());
    for (number, pod) in pods.take(MAX_ITEMS).enumerate() {
        let name = name("pods", number, &format!("{}_{}", pod.namespace, pod.name));
        let selector = PodSelector {
            namespace: pod.namespace,
            name: pod.name,
            uid: String::new(),
        };
        to.add(&name, explained(node, selector)).await?;
    }
    Ok(())
}

/// Explains a pod, including the pending changes to its rules: only pod-events knows the desired rules.
async fn explained(node: &Node, pod: PodSelector) -> Observed<String> {
    let request = ExplainPodRequest { pod: Some(pod) };
    let answer = node.ask(request, PodEvents::explain_pod);
    describe(answer, "ExplainPodResponse").await
}

async fn netns(node: &Node, to: &mut Archive) -> Result<(), CommandError> {
    let claims = match node.ask(ListClaimsRequest {}, Netconfig::list_claims).await {
        Ok(claims) => claims,
        Err(error) => {
            to.list_missing("claims.json", &error.first_line());
            return Ok(());
        }
    };
    let text = async { pretty(&claims, "inpod.netconfig.v1.ListClaimsResponse") };
    to.add("claims.json", text).await?;
    let sandboxes = claims.claims.into_iter().filter_map(|claim| claim.sandbox);
    for (number, sandbox) in sandboxes.take(MAX_ITEMS).enumerate() {
        let container = sandbox.container_id.clone();
        to.add(
            &name("netns", number, &container),
            inspected(node, sandbox.clone()),
        )
        .await?;
        to.add(
            &name("listeners", number, &container),
            listeners(node, sandbox),
        )
        .await?;
    }
    Ok(())
}

async fn inspected(node: &Node, sandbox: SandboxRef) -> Observed<String> {
    let request = InspectNetnsRequest {
        target: Some(inspect_netns_request::Target::Sandbox(sandbox)),
        ..InspectNetnsRequest::default()
    };
    let answer = node.ask(request, Netconfig::inspect_netns);
    describe(answer, "inpod.netconfig.v1.InspectNetnsResponse").await
}

async fn listeners(node: &Node, sandbox: SandboxRef) -> Observed<String> {
    let target = Some(list_listeners_request::Target::Sandbox(sandbox));
    let request = ListListenersRequest { target };
    let answer = node.ask(request, Netconfig::list_listeners);
    describe(answer, "inpod.netconfig.v1.ListListenersResponse").await
}

async fn broker(node: &Node, to: &mut Archive) -> Result<(), CommandError> {
    let workloads = node.ask(ListWorkloadsRequest {}, Broker::list_workloads);
    let workloads = describe(workloads, "inpod.ztunnelbroker.v1.ListWorkloadsResponse");
    to.add("workloads.json", workloads).await
}

/// Returns a file name that starts with a number, because truncated names may be equal.
fn name(part: &str, number: usize, of: &str) -> String {
    format!("{part}/{number:03}-{}.json", plain(of))
}

/// Replaces the characters forbidden in file names of an archive.
fn plain(name: &str) -> String {
    let plain = |c: char| match c {
        c if c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.') => c,
        _ => '_',
    };
    name.trim_start_matches('.')
        .chars()
        .take(60)
        .map(plain)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_leads_nowhere_else_and_fits_an_archive() {
        assert_eq!(plain("../etc/x y"), "_etc_x_y");
        assert_eq!(name("pods", 7, "shop_web"), "pods/007-shop_web.json");
        assert!(name("listeners", 499, &"x".repeat(300)).len() < 87);
    }
}
