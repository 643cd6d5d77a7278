//! `inpod leave`: every node is told how to go, and waited for; nodes that cannot be reached are named.
//!
//! The word is a ConfigMap that the agent's containers mount. Each of those that have a part in it writes one line when
//! it is done, which the kubelet shows as the last state of its container: no right to write is needed on the node. The
//! whole may be repeated: what has been said stays said, and what was done counts.

mod standing;

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use kube::{
    Api, Client,
    api::{ListParams, Patch, PatchParams, PostParams},
};
use serde_json::json;
use tokio::time::{Instant, sleep};

use crate::{
    arguments::{LeaveOrder, Mode},
    error::AskError,
    kubernetes::{ANSWER, failed, reach},
    out::Out,
    table::clean,
};
use standing::{Standing, image, standings};

/// What the agent's containers mount, and the key in it.
const CONFIG_MAP: &str = "inpod-leave";
const KEY: &str = "mode";

/// When the mode was said: receipts from before are of an earlier time.
const SINCE: &str = inpod_types::keys::LEAVE_SINCE;

/// How often it is looked how far nodes are.
const AGAIN: Duration = Duration::from_secs(2);

/// Who is asked, and where the agent is.
struct Cluster {
    client: Client,
    namespace: String,
    selector: String,
}

/// Says it, waits, and tells of each node.
pub(crate) async fn run(order: &LeaveOrder, out: &mut Out) -> Result<(), AskError> {
    let cluster = Cluster::reach(order).await?;
    let since = cluster.say(order.mode).await?;
    let (namespace, mode) = (&cluster.namespace, order.mode.word());
    out.line(&format!("ConfigMap {namespace}/{CONFIG_MAP} says {mode}; kubelets show it to the agent within about a minute"))?;
    let deadline = Instant::now() + order.patience;
    let mut told = BTreeMap::new();
    loop {
        let looked = cluster.look(order.mode, since).await;
        match looked {
            Ok((standings, image)) => {
                tell(&standings, &mut told, out)?;
                let is_late = Instant::now() >= deadline;
                let awaited = standings.values().any(Standing::is_awaited);
                if !awaited || is_late {
                    return conclude(&standings, order.mode, &image, out);
                }
            }
            Err(error) if error.is_final || Instant::now() >= deadline => return Err(error.error),
            Err(error) => out.line(&format!("{}; trying again", error.error))?,
        }
        sleep(AGAIN).await;
    }
}

/// A line for each node that stands otherwise than it was told last.
fn tell(
    standings: &BTreeMap<String, Standing>,
    told: &mut BTreeMap<String, Standing>,
    out: &mut Out,
) -> Result<(), AskError> {
    for (node, standing) in standings {
        if told.get(node) != Some(standing) {
            out.line(&format!(
                "{}: {}",
                clean(node),
                clean(&standing.to_string())
            ))?;
            told.insert(node.clone(), standing.clone());
        }
    }
    Ok(())
}

/// What is to be done by hand, and whether that is all.
fn conclude(
    standings: &BTreeMap<String, Standing>,
    mode: Mode,
    image: &str,
    out: &mut Out,
) -> Result<(), AskError> {
    let left = standings
        .values()
        .filter(|it| matches!(it, Standing::Left(_)));
    out.line(&format!(
        "{} of {} nodes have left",
        left.count(),
        standings.len()
    ))?;
    let rest = standings
        .iter()
        .filter(|(_, it)| !matches!(it, Standing::Left(_)));
    for (node, standing) in rest {
        let (node, mode) = (clean(node), mode.word());
        out.line(&format!(
            "{node}: {}; there, run",
            clean(&standing.to_string())
        ))?;
        out.line(&format!(
            "  kubectl debug node/{node} -it --profile=sysadmin --image={image} -- /installer {mode} --host-root /host"
        ))?;
    }
    let awaited = standings.iter().filter(|(_, it)| it.is_awaited());
    let awaited: Vec<_> = awaited.map(|(node, _)| clean(node)).collect();
    if awaited.is_empty() {
        return Ok(());
    }
    Err(AskError::NotLeft(awaited.join(", ")))
}

/// Why a look failed.
struct Lookless {
    error: AskError,
    /// Whether another attempt would fail alike.
    is_final: bool,
}

/// An answer that was had in time.
async fn in_time<T>(
    what: &str,
    answer: impl Future<Output = kube::Result<T>>,
) -> Result<T, Lookless> {
    match tokio::time::timeout(ANSWER, answer).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(Lookless {
            // The server understood, and will not.
            is_final: matches!(&error, kube::Error::Api(status) if (400..500).contains(&status.code) && status.code != 429),
            error: failed(what, &error),
        }),
        Err(_elapsed) => Err(Lookless {
            error: failed(what, &format!("no answer within {} s", ANSWER.as_secs())),
            is_final: false,
        }),
    }
}

impl Cluster {
    async fn reach(order: &LeaveOrder) -> Result<Self, AskError> {
        let (client, of_context) = reach(order.kubeconfig.as_deref()).await?;
        Ok(Self {
            client,
            namespace: order.namespace.clone().unwrap_or(of_context),
            selector: format!("app.kubernetes.io/name={}", order.daemonset),
        })
    }

    /// Sets the ConfigMap; since when it says so, in seconds since 1970.
    async fn say(&self, mode: Mode) -> Result<i64, AskError> {
        let maps = Api::<ConfigMap>::namespaced(self.client.clone(), &self.namespace);
        let what = format!("read ConfigMap {}/{CONFIG_MAP}", self.namespace);
        let known = in_time(&what, maps.get_opt(CONFIG_MAP)).await;
        let known = known.map_err(|it| it.error)?;
        if let Some(since) = known.as_ref().and_then(|known| said(known, mode)) {
            return Ok(since);
        }
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let now = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
        let change = json!({
            "metadata": {"name": CONFIG_MAP, "annotations": {SINCE: now.to_string()}},
            "data": {KEY: mode.word()},
        });
        let what = format!("write ConfigMap {}/{CONFIG_MAP}", self.namespace);
        let written = match known {
            Some(_) => {
                let (how, change) = (PatchParams::default(), Patch::Merge(change));
                in_time(&what, maps.patch(CONFIG_MAP, &how, &change)).await
            }
            None => {
                let map = serde_json::from_value(change).map_err(|error| failed(&what, &error))?;
                in_time(&what, maps.create(&PostParams::default(), &map)).await
            }
        };
        written.map(|_| now).map_err(|it| it.error)
    }

    async fn look(
        &self,
        mode: Mode,
        since: i64,
    ) -> Result<(BTreeMap<String, Standing>, String), Lookless> {
        let nodes = Api::<Node>::all(self.client.clone());
        let nodes = in_time("list nodes", nodes.list(&ListParams::default())).await?;
        let pods = Api::<Pod>::namespaced(self.client.clone(), &self.namespace);
        let how = ListParams::default().labels(&self.selector);
        let pods = in_time("list the agent's pods", pods.list(&how)).await?;
        Ok((
            standings(&nodes.items, &pods.items, mode, since),
            image(&pods.items),
        ))
    }
}

/// Since when a ConfigMap says this; `None` where it does not.
fn said(map: &ConfigMap, mode: Mode) -> Option<i64> {
    let says = map.data.as_ref()?.get(KEY)?;
    let since = map.metadata.annotations.as_ref()?.get(SINCE)?.parse().ok();
    since.filter(|_| says.trim() == mode.word())
}
