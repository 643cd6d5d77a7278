//! Finds the workload for telemetry, by resolving the pod's controller to the object that a person wrote
//! (services/docs/facts/istio-sidecar.md, 6.4 step 2).

use serde_json::Value;

use crate::json;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The API version with the group, for example `apps/v1`.
    pub api_version: String,
    pub kind: String,
    pub name: String,
}

/// The label on pods of a ReplicaSet that belongs to a Deployment.
const TEMPLATE_HASH: &str = "pod-template-hash";

/// The label on pods of a ReplicaSet that belongs to an Argo Rollout.
const ROLLOUT_HASH: &str = "rollouts-pod-template-hash";

impl Owner {
    /// Returns the workload behind the pod's controller, or the pod itself if there is no controller.
    pub fn of(pod: &Value) -> Self {
        let references = pod.pointer("/metadata/ownerReferences");
        let references = references.and_then(Value::as_array).into_iter().flatten();
        let mut controllers =
            references.filter(|it| it.get("controller") == Some(&Value::Bool(true)));
        controllers
            .next()
            .map_or_else(|| Self::itself(pod), |it| Self::behind(pod, it))
    }

    fn itself(pod: &Value) -> Self {
        let name = json::text(pod, "/metadata/name").filter(|name| !name.is_empty());
        let generated = || {
            let prefix = json::text(pod, "/metadata/generateName").unwrap_or_default();
            prefix.trim_end_matches('-')
        };
        Self::new("v1", "Pod", name.unwrap_or_else(generated))
    }

    fn new(api_version: &str, kind: &str, name: &str) -> Self {
        Self {
            api_version: api_version.to_owned(),
            kind: kind.to_owned(),
            name: name.to_owned(),
        }
    }

    fn behind(pod: &Value, controller: &Value) -> Self {
        let field = |key| json::text(controller, key).unwrap_or_default();
        let (kind, name) = (field("/kind"), field("/name"));
        let cut = |label| {
            let hash = json::label(pod, label).filter(|hash| !hash.is_empty())?;
            name.strip_suffix(hash)?.strip_suffix('-')
        };
        match kind {
            "ReplicaSet" => {
                if let Some(name) = cut(ROLLOUT_HASH) {
                    return Self::new("v1alpha1", "Rollout", name);
                }
                if let Some(name) = cut(TEMPLATE_HASH) {
                    return Self::new("apps/v1", "Deployment", name);
                }
            }
            "ReplicationController" => {
                if let Some(name) = json::label(pod, "deploymentconfig") {
                    return Self::new("apps.openshift.io/v1", "DeploymentConfig", name);
                }
            }
            "Job" => {
                if let Some(name) = of_cron_job(name) {
                    return Self::new("batch/v1", "CronJob", name);
                }
            }
            _ => {}
        }
        Self::new(field("/apiVersion"), kind, name)
    }
}

/// Cuts the scheduled minute, a number of eight to ten digits, from the name of a Job.
fn of_cron_job(name: &str) -> Option<&str> {
    let (name, time) = name.rsplit_once('-')?;
    let is_time = (8..=10).contains(&time.len()) && time.bytes().all(|byte| byte.is_ascii_digit());
    is_time.then_some(name)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[expect(
        clippy::needless_pass_by_value,
        reason = "tests pass values that they build in place"
    )]
    fn owned(kind: &str, name: &str, labels: Value) -> Owner {
        Owner::of(&json!({"metadata": {
            "generateName": "x-",
            "labels": labels,
            "ownerReferences": [{"apiVersion": "a/v1", "kind": kind, "name": name, "controller": true}],
        }}))
    }

    #[test]
    fn a_pod_is_of_what_a_person_wrote() {
        let seen = |kind, name, labels| {
            let Owner { kind, name, .. } = owned(kind, name, labels);
            format!("{kind}/{name}")
        };
        let hash = json!({"pod-template-hash": "5d4f"});
        assert_eq!(
            seen("ReplicaSet", "web-5d4f", hash.clone()),
            "Deployment/web"
        );
        assert_eq!(seen("ReplicaSet", "web-abcd", hash), "ReplicaSet/web-abcd");
        let hash = json!({"rollouts-pod-template-hash": "5d4f"});
        assert_eq!(seen("ReplicaSet", "web-5d4f", hash), "Rollout/web");
        assert_eq!(seen("Job", "tidy-29384756", json!({})), "CronJob/tidy");
        assert_eq!(seen("Job", "tidy-once", json!({})), "Job/tidy-once");
        let labels = json!({"deploymentconfig": "shop"});
        assert_eq!(
            seen("ReplicationController", "shop-1", labels),
            "DeploymentConfig/shop"
        );
        assert_eq!(seen("StatefulSet", "db", json!({})), "StatefulSet/db");
    }

    #[test]
    fn a_pod_without_an_owner_is_its_own_workload() {
        let pod = json!({"metadata": {"generateName": "one-off-"}});
        assert_eq!(Owner::of(&pod).name, "one-off");
        assert_eq!(Owner::of(&json!({})).kind, "Pod");
    }
}
