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
use tokio::{net::UnixStream, time::timeout};

use super::{collect::Collector, files};
use crate::{
    arguments::BundleOptions,
    doctor,
    error::CommandError,
    host_fs::{HostFs, Observed},
    json,
    node::{BROKER, NETCONFIG, Node, POD_EVENTS},
};

/// The most pods, and the most network namespaces, that are described one by one.
const MAX_ITEMS: usize = 500;

const HOST_FILES: [(&str, &str); 7] = [
    ("node/osrelease.txt", "/proc/sys/kernel/osrelease"),
    ("node/os-release.txt", "/etc/os-release"),
    ("node/modules.txt", "/proc/modules"),
    ("node/mountinfo.txt", "/proc/1/mountinfo"),
    (
        "node/enrolled-namespaces.txt",
        "/var/lib/inpod/plugin/enrolled-namespaces",
    ),
    ("node/containerd-config.txt", "/etc/containerd/config.toml"),
    ("node/crio-config.txt", "/etc/crio/crio.conf"),
];

pub(super) async fn all(
    node: &Node,
    options: &BundleOptions,
    to: &mut Collector,
) -> Result<(), CommandError> {
    let asking = node.with_timeout(doctor::QUERY_TIMEOUT);
    let node = &asking;
    let doctor = &options.doctor;
    let report = async { Ok(doctor::as_json(node, doctor).await) };
    to.add("doctor.json", report).await?;
    pods(node, to).await?;
    netns(node, to).await?;
    broker(node, to).await?;
    let is_here = |service: &&str| node.socket(service).exists();
    let optional = doctor::OPTIONAL_SERVICES.into_iter().filter(is_here);
    for service in doctor::SERVICES.into_iter().chain(optional) {
        to.add(
            &format!("metrics/{service}.txt"),
            doctor::metrics(node, service),
        )
        .await?;
        to.add(
            &format!("services/{service}.txt"),
            started(node, &doctor.root, service),
        )
        .await?;
    }
    chain(options, to)?;
    installer(&doctor.root, to)?;
    for (name, path) in HOST_FILES {
        found(name, doctor.root.text_if_there(path), to)?;
    }
    logs(options, to)
}

fn pretty(message: &impl prost::Message, name: &str) -> Observed<String> {
    json::pretty(message, name).map_err(|error| error.to_string())
}

fn found(
    name: &str,
    text: Observed<Option<String>>,
    to: &mut Collector,
) -> Result<(), CommandError> {
    match text {
        Ok(Some(text)) => to.put(name, &text),
        Ok(None) => to.add_missing(name, "does not exist"),
        Err(why) => to.add_missing(name, &why),
    }
}

async fn pods(node: &Node, to: &mut Collector) -> Result<(), CommandError> {
    let status = async {
        let mut client = node.pod_events();
        let answer = client.get_status(node.request(GetStatusRequest {}));
        let answer = node.answer(POD_EVENTS, answer).await;
        pretty(
            &answer.map_err(|error| error.first_line())?,
            "GetStatusResponse",
        )
    };
    to.add("status.json", status).await?;
    let mut client = node.pod_events();
    let answer = client.list_pods(node.request(ListPodsRequest::default()));
    let pods = match node.answer(POD_EVENTS, answer).await {
        Ok(pods) => pods,
        Err(error) => return to.add_missing("pods.json", &error.first_line()),
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
    let mut client = node.pod_events();
    let answer = client.explain_pod(node.request(ExplainPodRequest { pod: Some(pod) }));
    let answer = node.answer(POD_EVENTS, answer).await;
    pretty(
        &answer.map_err(|error| error.first_line())?,
        "ExplainPodResponse",
    )
}

async fn netns(node: &Node, to: &mut Collector) -> Result<(), CommandError> {
    let mut client = node.netconfig();
    let answer = client.list_claims(node.request(ListClaimsRequest {}));
    let claims = match node.answer(NETCONFIG, answer).await {
        Ok(claims) => claims,
        Err(error) => return to.add_missing("claims.json", &error.first_line()),
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
    let target = Some(inspect_netns_request::Target::Sandbox(sandbox));
    let mut client = node.netconfig();
    let answer = client.inspect_netns(node.request(InspectNetnsRequest {
        target,
        ..InspectNetnsRequest::default()
    }));
    let answer = node.answer(NETCONFIG, answer).await;
    let answer = answer.map_err(|error| error.first_line())?;
    pretty(&answer, "inpod.netconfig.v1.InspectNetnsResponse")
}

async fn listeners(node: &Node, sandbox: SandboxRef) -> Observed<String> {
    let target = Some(list_listeners_request::Target::Sandbox(sandbox));
    let mut client = node.netconfig();
    let answer = client.list_listeners(node.request(ListListenersRequest { target }));
    let answer = node.answer(NETCONFIG, answer).await;
    let answer = answer.map_err(|error| error.first_line())?;
    pretty(&answer, "inpod.netconfig.v1.ListListenersResponse")
}

async fn broker(node: &Node, to: &mut Collector) -> Result<(), CommandError> {
    let workloads = async {
        let mut client = node.broker();
        let answer = client.list_workloads(node.request(ListWorkloadsRequest {}));
        let answer = node.answer(BROKER, answer).await;
        let answer = answer.map_err(|error| error.first_line())?;
        pretty(&answer, "inpod.ztunnelbroker.v1.ListWorkloadsResponse")
    };
    to.add("workloads.json", workloads).await
}

async fn started(node: &Node, root: &HostFs, service: &str) -> Observed<String> {
    let stream = timeout(
        doctor::QUERY_TIMEOUT,
        UnixStream::connect(node.socket(service)),
    )
    .await;
    let stream = stream.map_err(|_elapsed| "connection not accepted in time".to_owned())?;
    let peer = stream.and_then(|stream| stream.peer_cred());
    let peer = peer.map_err(|error| error.to_string())?;
    let pid = peer.pid().filter(|pid| *pid > 0);
    files::started(
        root,
        pid.ok_or_else(|| "its pid is not visible from here".to_owned())?,
    )
}

fn chain(options: &BundleOptions, to: &mut Collector) -> Result<(), CommandError> {
    let doctor = &options.doctor;
    let root = &doctor.root;
    let chain = doctor::network_chain(root, &doctor.paths);
    directory("cni", root, &chain.directory, to)
}

fn installer(root: &HostFs, to: &mut Collector) -> Result<(), CommandError> {
    directory("installer", root, doctor::INSTALLER_STATE, to)
}

fn directory(
    part: &str,
    root: &HostFs,
    path: &str,
    to: &mut Collector,
) -> Result<(), CommandError> {
    let names = match root.names(path) {
        Ok(names) => names.unwrap_or_default(),
        Err(why) => return to.add_missing(part, &why),
    };
    if names.is_empty() {
        return to.add_missing(part, &format!("{path} is empty or does not exist"));
    }
    for file in names.iter().take(MAX_ITEMS) {
        let from = format!("{path}/{file}");
        if root.at(&from).is_file() {
            found(
                &format!("{part}/{}", plain(file)),
                root.text_if_there(&from),
                to,
            )?;
        }
    }
    Ok(())
}

fn logs(options: &BundleOptions, to: &mut Collector) -> Result<(), CommandError> {
    let root = &options.doctor.root;
    for path in &options.logs {
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        found(
            &format!("logs/{}", plain(&file)),
            files::tail(path).map(Some),
            to,
        )?;
    }
    match files::logs(root) {
        Ok(logs) => {
            for (name, path) in logs {
                found(
                    &format!("logs/{}", plain(&name)),
                    files::tail(&root.at(&path)).map(Some),
                    to,
                )?;
            }
            Ok(())
        }
        Err(why) => to.add_missing("logs", &why),
    }
}

/// Returns a file name that starts with a number, because truncated names may be equal.
fn name(part: &str, number: usize, of: &str) -> String {
    format!("{part}/{number:03}-{}.json", plain(of))
}

/// Replaces the characters that a file name in an archive does not permit.
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
