//! `inpod uninstall` and `inpod handover`: request the removal of inpod from every node and wait for the nodes.
//!
//! The request is a ConfigMap that the agent's containers mount. Each container reports a one-line receipt as its
//! termination message, so that no process on a node needs a right to write. The command may be repeated: requests and
//! results of earlier runs count.

mod progress;

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use inpod_service::{UninstallMode, escape_controls};
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use kube::{
    Api, Client,
    api::{ListParams, Patch, PatchParams, PostParams},
};
use serde_json::json;
use tokio::time::{Instant, sleep};

use crate::{
    arguments::UninstallOptions,
    error::CommandError,
    kubernetes::{self, REQUEST_TIMEOUT},
    out::Out,
};
use progress::{NodeProgress, installer_image, progress_by_node};

/// The ConfigMap of the request, and the key of the mode.
const CONFIG_MAP: &str = "inpod-leave";
const MODE_KEY: &str = "mode";

/// The annotation with the time of the request: receipts from before do not count.
const SINCE_ANNOTATION: &str = inpod_types::keys::LEAVE_SINCE;

const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// A client of the API server, and the namespace and labels of the agent's pods.
struct Cluster {
    client: Client,
    namespace: String,
    selector: String,
}

/// Writes the request and prints the progress of each node until no reachable node is unfinished, or until the timeout.
pub(crate) async fn run(
    mode: UninstallMode,
    options: &UninstallOptions,
    out: &mut Out,
) -> Result<(), CommandError> {
    let cluster = Cluster::connect(options).await?;
    let since = cluster.request(mode).await?;
    let (namespace, name) = (&cluster.namespace, mode.as_str());
    out.print_line(&format!("set ConfigMap {namespace}/{CONFIG_MAP} to {name}; kubelets deliver it to the agent within about a minute"))?;
    let deadline = Instant::now() + options.timeout;
    let mut reported = BTreeMap::new();
    loop {
        let observed = cluster.observe(mode, since).await;
        match observed {
            Ok((nodes, image)) => {
                report_changes(&nodes, &mut reported, out)?;
                let is_late = Instant::now() >= deadline;
                let waiting = nodes.values().any(NodeProgress::is_waiting);
                if !waiting || is_late {
                    return report_result(&nodes, mode, &image, out);
                }
            }
            Err(error) if error.is_final || Instant::now() >= deadline => return Err(error.error),
            Err(error) => out.print_line(&format!("{}; retrying", error.error))?,
        }
        sleep(POLL_INTERVAL).await;
    }
}

fn report_changes(
    nodes: &BTreeMap<String, NodeProgress>,
    reported: &mut BTreeMap<String, NodeProgress>,
    out: &mut Out,
) -> Result<(), CommandError> {
    for (node, progress) in nodes {
        if reported.get(node) != Some(progress) {
            out.print_line(&format!(
                "{}: {}",
                escape_controls(node),
                escape_controls(&progress.to_string())
            ))?;
            reported.insert(node.clone(), progress.clone());
        }
    }
    Ok(())
}

/// Prints a command for each unfinished node, and fails if any unfinished node is reachable.
fn report_result(
    nodes: &BTreeMap<String, NodeProgress>,
    mode: UninstallMode,
    image: &str,
    out: &mut Out,
) -> Result<(), CommandError> {
    let left = nodes
        .values()
        .filter(|it| matches!(it, NodeProgress::Done(_)));
    out.print_line(&format!("{} of {} nodes done", left.count(), nodes.len()))?;
    let rest = nodes
        .iter()
        .filter(|(_, it)| !matches!(it, NodeProgress::Done(_)));
    for (node, progress) in rest {
        let (node, mode) = (escape_controls(node), mode.as_str());
        out.print_line(&format!(
            "{node}: {}; on this node, run",
            escape_controls(&progress.to_string())
        ))?;
        out.print_line(&format!(
            "  kubectl debug node/{node} -it --profile=sysadmin --image={image} -- /installer {mode} --host-root /host"
        ))?;
    }
    let waiting = nodes.iter().filter(|(_, it)| it.is_waiting());
    let waiting: Vec<_> = waiting.map(|(node, _)| escape_controls(node)).collect();
    if waiting.is_empty() {
        return Ok(());
    }
    Err(CommandError::UninstallIncomplete(waiting.join(", ")))
}

struct QueryError {
    error: CommandError,
    /// A retry would fail in the same way.
    is_final: bool,
}

async fn with_timeout<T>(
    what: &str,
    answer: impl Future<Output = kube::Result<T>>,
) -> Result<T, QueryError> {
    match tokio::time::timeout(REQUEST_TIMEOUT, answer).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(QueryError {
            // The API server rejected the request, for a reason other than overload.
            is_final: matches!(&error, kube::Error::Api(status) if (400..500).contains(&status.code) && status.code != 429),
            error: kubernetes::error(what, &error),
        }),
        Err(_elapsed) => Err(QueryError {
            error: kubernetes::error(
                what,
                &format!("no answer within {} s", REQUEST_TIMEOUT.as_secs()),
            ),
            is_final: false,
        }),
    }
}

impl Cluster {
    async fn connect(options: &UninstallOptions) -> Result<Self, CommandError> {
        let (client, of_context) = kubernetes::connect(options.kubeconfig.as_deref()).await?;
        Ok(Self {
            client,
            namespace: options.namespace.clone().unwrap_or(of_context),
            selector: format!("app.kubernetes.io/name={}", options.daemonset),
        })
    }

    /// Writes the request unless an earlier run has written the same one, and returns its time in seconds since 1970.
    async fn request(&self, mode: UninstallMode) -> Result<i64, CommandError> {
        let maps = Api::<ConfigMap>::namespaced(self.client.clone(), &self.namespace);
        let what = format!("read ConfigMap {}/{CONFIG_MAP}", self.namespace);
        let known = with_timeout(&what, maps.get_opt(CONFIG_MAP)).await;
        let known = known.map_err(|it| it.error)?;
        if let Some(since) = known
            .as_ref()
            .and_then(|known| requested_since(known, mode))
        {
            return Ok(since);
        }
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let now = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
        let change = json!({
            "metadata": {"name": CONFIG_MAP, "annotations": {SINCE_ANNOTATION: now.to_string()}},
            "data": {MODE_KEY: mode.as_str()},
        });
        let what = format!("write ConfigMap {}/{CONFIG_MAP}", self.namespace);
        let written = match known {
            Some(_) => {
                let (how, change) = (PatchParams::default(), Patch::Merge(change));
                with_timeout(&what, maps.patch(CONFIG_MAP, &how, &change)).await
            }
            None => {
                let map = serde_json::from_value(change)
                    .map_err(|error| kubernetes::error(&what, &error))?;
                with_timeout(&what, maps.create(&PostParams::default(), &map)).await
            }
        };
        written.map(|_| now).map_err(|it| it.error)
    }

    async fn observe(
        &self,
        mode: UninstallMode,
        since: i64,
    ) -> Result<(BTreeMap<String, NodeProgress>, String), QueryError> {
        let api = Api::<Node>::all(self.client.clone());
        let nodes = with_timeout("list nodes", api.list(&ListParams::default())).await?;
        let pods = Api::<Pod>::namespaced(self.client.clone(), &self.namespace);
        let how = ListParams::default().labels(&self.selector);
        let pods = with_timeout("list the agent's pods", pods.list(&how)).await?;
        Ok((
            progress_by_node(&nodes.items, &pods.items, mode, since),
            installer_image(&pods.items),
        ))
    }
}

/// Returns the time of an earlier request, if its mode is the same.
fn requested_since(map: &ConfigMap, mode: UninstallMode) -> Option<i64> {
    let mode_set = map.data.as_ref()?.get(MODE_KEY)?;
    let since = map
        .metadata
        .annotations
        .as_ref()?
        .get(SINCE_ANNOTATION)?
        .parse()
        .ok();
    since.filter(|_| mode_set.trim() == mode.as_str())
}
