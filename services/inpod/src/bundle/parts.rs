//! What is collected, in the order of its worth.

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
    arguments::BundleOrder,
    ask::{BROKER, NETCONFIG, Node, POD_EVENTS},
    doctor,
    error::AskError,
    json,
    root::{Root, Seen},
};

/// Of so many pods and netns everything is told.
const MOST: usize = 500;

/// Files of the node that say what its kernel and its runtime are.
const FILES: [(&str, &str); 7] = [
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

/// Collects all of it.
pub(super) async fn all(
    node: &Node,
    order: &BundleOrder,
    to: &mut Collector,
) -> Result<(), AskError> {
    let asking = node.with_timeout(doctor::PATIENCE);
    let node = &asking;
    let examination = &order.examination;
    let doctor = async { Ok(doctor::as_json(node, examination).await) };
    to.add("doctor.json", doctor).await?;
    people(node, to).await?;
    netns(node, to).await?;
    broker(node, to).await?;
    let is_here = |service: &&str| node.socket(service).exists();
    let at_will = doctor::AT_WILL.into_iter().filter(is_here);
    for service in doctor::SERVICES.into_iter().chain(at_will) {
        to.add(
            &format!("metrics/{service}.txt"),
            doctor::metrics(node, service),
        )
        .await?;
        to.add(
            &format!("services/{service}.txt"),
            started(node, &examination.root, service),
        )
        .await?;
    }
    chain(order, to)?;
    installer(&examination.root, to)?;
    for (name, path) in FILES {
        found(name, examination.root.text_if_there(path), to)?;
    }
    logs(order, to)
}

fn pretty(message: &impl prost::Message, name: &str) -> Seen<String> {
    json::pretty(message, name).map_err(|error| error.to_string())
}

fn found(name: &str, text: Seen<Option<String>>, to: &mut Collector) -> Result<(), AskError> {
    match text {
        Ok(Some(text)) => to.put(name, &text),
        Ok(None) => to.miss(name, "there is none"),
        Err(why) => to.miss(name, &why),
    }
}

async fn people(node: &Node, to: &mut Collector) -> Result<(), AskError> {
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
        Err(error) => return to.miss("pods.json", &error.first_line()),
    };
    to.add("pods.json", async { pretty(&pods, "ListPodsResponse") })
        .await?;
    let pods = pods.pods.iter().filter_map(|pod| pod.pod.clone());
    for (number, pod) in pods.take(MOST).enumerate() {
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

/// With what ApplyRules would do now: only pod-events knows which rules belong there.
async fn explained(node: &Node, pod: PodSelector) -> Seen<String> {
    let mut client = node.pod_events();
    let answer = client.explain_pod(node.request(ExplainPodRequest { pod: Some(pod) }));
    let answer = node.answer(POD_EVENTS, answer).await;
    pretty(
        &answer.map_err(|error| error.first_line())?,
        "ExplainPodResponse",
    )
}

async fn netns(node: &Node, to: &mut Collector) -> Result<(), AskError> {
    let mut client = node.netconfig();
    let answer = client.list_claims(node.request(ListClaimsRequest {}));
    let claims = match node.answer(NETCONFIG, answer).await {
        Ok(claims) => claims,
        Err(error) => return to.miss("claims.json", &error.first_line()),
    };
    let text = async { pretty(&claims, "inpod.netconfig.v1.ListClaimsResponse") };
    to.add("claims.json", text).await?;
    let sandboxes = claims.claims.into_iter().filter_map(|claim| claim.sandbox);
    for (number, sandbox) in sandboxes.take(MOST).enumerate() {
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

async fn inspected(node: &Node, sandbox: SandboxRef) -> Seen<String> {
    let target = Some(inspect_netns_request::Target::Sandbox(sandbox));
    let mut client = node.netconfig();
    let answer = client.inspect_netns(node.request(InspectNetnsRequest { target }));
    let answer = node.answer(NETCONFIG, answer).await;
    let answer = answer.map_err(|error| error.first_line())?;
    pretty(&answer, "inpod.netconfig.v1.InspectNetnsResponse")
}

async fn listeners(node: &Node, sandbox: SandboxRef) -> Seen<String> {
    let target = Some(list_listeners_request::Target::Sandbox(sandbox));
    let mut client = node.netconfig();
    let answer = client.list_listeners(node.request(ListListenersRequest { target }));
    let answer = node.answer(NETCONFIG, answer).await;
    let answer = answer.map_err(|error| error.first_line())?;
    pretty(&answer, "inpod.netconfig.v1.ListListenersResponse")
}

async fn broker(node: &Node, to: &mut Collector) -> Result<(), AskError> {
    let workloads = async {
        let mut client = node.broker();
        let answer = client.list_workloads(node.request(ListWorkloadsRequest {}));
        let answer = node.answer(BROKER, answer).await;
        let answer = answer.map_err(|error| error.first_line())?;
        pretty(&answer, "inpod.ztunnelbroker.v1.ListWorkloadsResponse")
    };
    to.add("workloads.json", workloads).await
}

async fn started(node: &Node, root: &Root, service: &str) -> Seen<String> {
    let stream = timeout(doctor::PATIENCE, UnixStream::connect(node.socket(service))).await;
    let stream = stream.map_err(|_elapsed| "nobody accepts connections".to_owned())?;
    let peer = stream.and_then(|stream| stream.peer_cred());
    let peer = peer.map_err(|error| error.to_string())?;
    let pid = peer.pid().filter(|pid| *pid > 0);
    files::started(
        root,
        pid.ok_or_else(|| "its pid cannot be seen from here".to_owned())?,
    )
}

fn chain(order: &BundleOrder, to: &mut Collector) -> Result<(), AskError> {
    let examination = &order.examination;
    let root = &examination.root;
    let chain = doctor::network_chain(root, &examination.places);
    directory("cni", root, &chain.directory, to)
}

fn installer(root: &Root, to: &mut Collector) -> Result<(), AskError> {
    directory("installer", root, doctor::INSTALLER_STATE, to)
}

/// The files of a directory; what is in directories of its own is left out.
fn directory(part: &str, root: &Root, path: &str, to: &mut Collector) -> Result<(), AskError> {
    let names = match root.names(path) {
        Ok(names) => names.unwrap_or_default(),
        Err(why) => return to.miss(part, &why),
    };
    if names.is_empty() {
        return to.miss(part, &format!("nothing is in {path}"));
    }
    for file in names.iter().take(MOST) {
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

fn logs(order: &BundleOrder, to: &mut Collector) -> Result<(), AskError> {
    let root = &order.examination.root;
    for path in &order.logs {
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
        Err(why) => to.miss("logs", &why),
    }
}

/// A name in a bundle: numbered, since it may have to be cut.
fn name(part: &str, number: usize, of: &str) -> String {
    format!("{part}/{number:03}-{}.json", plain(of))
}

/// Of a name what can be a file's, and not more than an archive takes.
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
