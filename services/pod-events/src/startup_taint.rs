//! Removes the node's start-up taints once the agent is ready, so that no pod starts on the node earlier.
//!
//! Operators register nodes with such a taint. A Node can be registered again, so pod-events keeps reading the Node.

use std::{sync::Arc, time::Duration};

use inpod_service::Daemon;
use k8s_openapi::api::core::v1 as k8s;
use kube::{
    Api,
    api::{ApiResource, DynamicObject, Patch, PatchParams},
    runtime::{utils::Backoff as _, watcher::DefaultBackoff},
};
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};

use crate::{labels::TaintKey, leave_mode::LeaveMode, status::REPORTER, tasks::Shared};

/// The condition that start-up taints can be removed. The condition does not affect readiness, because ADDs do not
/// depend on taints.
const CONDITION: &str = "startup-taints";

/// The other services that must be ready: netconfig can apply rules, and the installer has proved the chain.
const SERVICES: [&str; 2] = ["netconfig", "installer"];

/// The interval of reading the Node while nothing fails.
const CHECK_INTERVAL: Duration = Duration::from_secs(600);

/// The interval of asking the node's services, which costs the API server nothing.
const READINESS_INTERVAL: Duration = Duration::from_secs(2);

/// The delay after a refusal. A restarted API server refuses allowed requests for a shorter time, until RBAC is loaded.
const REFUSAL_INTERVAL: Duration = Duration::from_secs(60);

const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// The reason why start-up taints stay.
#[derive(Debug, thiserror::Error)]
enum Obstacle {
    #[error("start-up taints stay until the agent is ready: {0}")]
    NotReady(String),
    #[error("cannot remove start-up taints: {0}")]
    Refused(String),
    #[error("cannot remove start-up taints yet: {0}")]
    Unanswered(String),
}

struct Controller {
    api: Api<DynamicObject>,
    node: String,
    keys: Vec<TaintKey>,
    leave_mode: LeaveMode,
    daemon: Daemon,
}

/// Starts to remove start-up taints, if the settings name a taint.
pub(crate) fn start(shared: &Arc<Shared>, daemon: &Daemon) {
    let config = &shared.config;
    if config.startup_taints.is_empty() {
        return;
    }
    let Some(api_server) = &shared.status.api_server else {
        let message = "start-up taints need the API server: set pods_from=kubernetes, or remove startup_taints";
        daemon.readiness().set(CONDITION, Err(message.to_owned()));
        return;
    };
    let kind = ApiResource::erase::<k8s::Node>(&());
    let controller = Controller {
        api: Api::all_with(api_server.client.clone(), &kind),
        node: config.node_name.to_string(),
        keys: config.startup_taints.clone(),
        leave_mode: shared.leave_mode.clone(),
        daemon: daemon.clone(),
    };
    tokio::spawn(inpod_service::abort_on_panic(CONDITION, controller.run()));
}

impl Controller {
    async fn run(self) {
        let mut delays = DefaultBackoff::default();
        loop {
            let attempt = self.remove_taints().await;
            let delay = match &attempt {
                Ok(()) => CHECK_INTERVAL,
                Err(Obstacle::NotReady(_)) => READINESS_INTERVAL,
                Err(Obstacle::Refused(_)) => REFUSAL_INTERVAL,
                Err(Obstacle::Unanswered(_)) => delays.next().unwrap_or(REFUSAL_INTERVAL),
            };
            if attempt.is_ok() {
                delays.reset();
            }
            let condition = attempt.map_err(|obstacle| obstacle.to_string());
            self.daemon.readiness().set(CONDITION, condition);
            sleep(delay).await;
        }
    }

    async fn remove_taints(&self) -> Result<(), Obstacle> {
        self.check_ready().await.map_err(Obstacle::NotReady)?;
        let node = self.request(self.api.get(&self.node)).await?;
        let Some(change) = removal(&node, &self.keys) else {
            return Ok(());
        };
        let (params, patch) = (PatchParams::apply(REPORTER), Patch::Merge(change));
        let patched = self.api.patch(&self.node, &params, &patch);
        self.request(patched).await?;
        tracing::info!(node = self.node, "Removed the start-up taints of this node");
        Ok(())
    }

    async fn check_ready(&self) -> Result<(), String> {
        if self.leave_mode.watch().borrow().is_some() {
            return Err("inpod leaves this node".to_owned());
        }
        if !self.daemon.readiness().is_ready() {
            return Err("pod-events is not ready".to_owned());
        }
        for service in SERVICES {
            let checked = self.daemon.check_ready(service).await;
            checked.map_err(|error| format!("{error:#}"))?;
        }
        Ok(())
    }

    async fn request<T>(
        &self,
        answer: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, Obstacle> {
        let answered = timeout(REQUEST_TIMEOUT, answer).await;
        let late = |_| Obstacle::Unanswered("the API server does not answer in time".to_owned());
        let answer = answered.map_err(late)?;
        answer.map_err(|error| obstacle_of(&self.node, &error))
    }
}

/// Returns the patch that removes the taints with these keys from a Node, or `None` if the Node has no such taint. The
/// resource version makes the API server refuse the patch if the Node has changed since.
fn removal(node: &DynamicObject, keys: &[TaintKey]) -> Option<Value> {
    let taints = node.data.pointer("/spec/taints")?.as_array()?;
    let is_startup = |taint: &Value| {
        let key = taint.get("key").and_then(Value::as_str);
        keys.iter().any(|known| key == Some(known.as_str()))
    };
    let others: Vec<_> = taints.iter().filter(|taint| !is_startup(taint)).collect();
    let metadata = json!({"resourceVersion": node.metadata.resource_version});
    (others.len() < taints.len()).then(|| json!({"metadata": metadata, "spec": {"taints": others}}))
}

fn obstacle_of(node: &str, error: &kube::Error) -> Obstacle {
    let message = inpod_kube::describe_error(error);
    let kube::Error::Api(status) = error else {
        return Obstacle::Unanswered(message);
    };
    // With 409, another client has changed the Node, which is read again.
    let is_refused = status.code != 409 && inpod_kube::is_final(error);
    match status.code {
        404 => Obstacle::Refused(format!(
            "there is no Node {node:?}: set node_name to the name of this node's Node"
        )),
        401 | 403 => Obstacle::Refused(format!(
            "{message}; pod-events needs get and patch of nodes, which the chart grants with startupTaints"
        )),
        _ if is_refused => Obstacle::Refused(message),
        _ => Obstacle::Unanswered(message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: &str = "inpod.io/not-ready";

    fn keys() -> Vec<TaintKey> {
        vec![
            OURS.parse().unwrap(),
            "cni.istio.io/not-ready".parse().unwrap(),
        ]
    }

    fn node(taints: &Value) -> DynamicObject {
        serde_json::from_value(json!({
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": "node-1", "resourceVersion": "7"},
            "spec": {"taints": taints, "unschedulable": true},
        }))
        .unwrap()
    }

    fn taint(key: &str, effect: &str) -> Value {
        json!({"key": key, "effect": effect, "timeAdded": "2026-01-01T00:00:00Z", "later": "kept"})
    }

    #[test]
    fn a_removal_leaves_foreign_taints_as_they_are() {
        let foreign = taint("example.com/gpu", "NoSchedule");
        let taints = [
            taint(OURS, "NoSchedule"),
            foreign.clone(),
            taint(OURS, "NoExecute"),
            taint("cni.istio.io/not-ready", "NoSchedule"),
        ];
        let change = removal(&node(&json!(taints)), &keys());
        let wanted = json!({"metadata": {"resourceVersion": "7"}, "spec": {"taints": [foreign]}});
        assert_eq!(change, Some(wanted));
    }

    #[test]
    fn a_node_without_a_startup_taint_is_not_patched() {
        let foreign = json!([taint("example.com/not-ready", "NoSchedule")]);
        for taints in [Value::Null, json!([]), foreign] {
            assert_eq!(removal(&node(&taints), &keys()), None, "{taints}");
        }
        let ours = node(&json!([taint(OURS, "NoSchedule")]));
        assert_eq!(removal(&ours, &[]), None, "no key is configured");
    }

    #[test]
    fn a_taint_key_is_refused_with_the_name_of_the_setting() {
        for key in ["not-ready", OURS, "cni.istio.io/not-ready"] {
            assert!(key.parse::<TaintKey>().is_ok(), "{key}");
        }
        for key in [
            "",
            "inpod.io/",
            "inpod.io/not ready",
            "inpod.io/not-ready:NoSchedule",
            "Inpod.io/not-ready",
            "node.kubernetes.io/unschedulable",
            "kubernetes.io/arch",
        ] {
            let error = key.parse::<TaintKey>().unwrap_err();
            assert!(error.starts_with("setting startup_taints: "), "{error}");
            assert!(error.contains(&format!("{key:?}")), "{error}");
        }
    }

    fn answer(code: u16) -> Obstacle {
        let status = json!({"status": "Failure", "code": code, "message": "no"});
        let status = serde_json::from_value(status).unwrap();
        obstacle_of("node-1", &kube::Error::Api(Box::new(status)))
    }

    #[test]
    fn a_refusal_names_the_remedy_and_a_conflict_is_retried() {
        for (code, remedy) in [(403, "startupTaints"), (404, "node_name"), (422, "422")] {
            let obstacle = answer(code);
            assert!(matches!(obstacle, Obstacle::Refused(_)), "{code}");
            assert!(obstacle.to_string().contains(remedy), "{obstacle}");
        }
        for code in [409, 429, 500, 503] {
            assert!(matches!(answer(code), Obstacle::Unanswered(_)), "{code}");
        }
    }
}
