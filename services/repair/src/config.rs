//! The settings. Settings that Istio's repair controller also has use its names and defaults
//! (services/docs/facts/istio-sidecar.md, 5), except `repair_pods`, whose default is false in Istio.

use std::{
    num::NonZeroU16,
    path::{Path, PathBuf},
    time::Duration,
};

use inpod_service::Key;
use inpod_types::{NodeName, is_cni_name, is_dns_subdomain, keys};
use serde::{Deserialize, Deserializer, de::Error as _};

use crate::detect::Criteria;

pub const KEYS: &[Key] = &[
    Key {
        name: "node_name",
        default: None,
        help: "This node's name in Kubernetes",
    },
    Key {
        name: "kubeconfig",
        default: Some(""),
        help: "How the API server is reached: a kubeconfig file; none: as the pod's service account",
    },
    Key {
        name: "repair_pods",
        default: Some("true"),
        help: "Whether pod-events is given time to redirect a pod in place before the pod is labelled or deleted (true or false)",
    },
    Key {
        name: "label_pods",
        default: Some("false"),
        help: "Whether pods that stay without redirection are labelled (true or false)",
    },
    Key {
        name: "delete_pods",
        default: Some("false"),
        help: "Whether pods whose init container failed because redirection is missing, and stays missing, are deleted (true or false)",
    },
    Key {
        name: "repair_wait_seconds",
        default: Some("30"),
        help: "How long each action is given to help before the next, more disruptive one is taken",
    },
    Key {
        name: "changes_per_minute",
        default: Some("6"),
        help: "Maximum number of pods of the node that are labelled or deleted per minute, 1 to 600",
    },
    Key {
        name: "unknown_after_seconds",
        default: Some("0"),
        help: "How long pod-events may be away before the condition inpod.io/InMesh of its pods changes from True to Unknown; 0: never",
    },
    Key {
        name: "broken_pod_label_key",
        default: Some(keys::UNINITIALIZED),
        help: "The label's name",
    },
    Key {
        name: "broken_pod_label_value",
        default: Some(keys::UNINITIALIZED_TRUE),
        help: "The label's value",
    },
    Key {
        name: "sidecar_annotation",
        default: Some(keys::SIDECAR_STATUS),
        help: "Annotation that a pod must have for its status to be checked; empty: every pod is checked",
    },
    Key {
        name: "init_container_name",
        default: Some("istio-validation"),
        help: "Init container that fails when redirection is missing; empty: any",
    },
    Key {
        name: "init_container_termination_message",
        default: Some(""),
        help: "Required termination message of that container (trimmed); empty: any",
    },
    Key {
        name: "init_container_exit_code",
        default: Some("126"),
        help: "Required exit code of that container; 0: any",
    },
    Key {
        name: "label_selectors",
        default: Some(""),
        help: "Label selector for the pods of the node to check; empty: all",
    },
    Key {
        name: "field_selectors",
        default: Some(""),
        help: "Field selector for the pods of the node to check; empty: all",
    },
];

#[derive(Clone, Debug, Deserialize)]
pub struct Config {
    #[serde(deserialize_with = "inpod_service::config::parsed")]
    pub node_name: NodeName,
    kubeconfig: PathBuf,
    repair_pods: bool,
    label_pods: bool,
    delete_pods: bool,
    repair_wait_seconds: u32,
    #[serde(deserialize_with = "rate")]
    changes_per_minute: NonZeroU16,
    unknown_after_seconds: u32,
    #[serde(deserialize_with = "label_key")]
    broken_pod_label_key: String,
    #[serde(deserialize_with = "label_value")]
    broken_pod_label_value: String,
    sidecar_annotation: String,
    init_container_name: String,
    init_container_termination_message: String,
    #[serde(deserialize_with = "exit_code")]
    init_container_exit_code: u8,
    label_selectors: String,
    field_selectors: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Modes {
    /// Wait for pod-events to redirect the running pod before any other action.
    pub repair: bool,
    pub label: bool,
    pub delete: bool,
    /// The time that each action has before the next action follows.
    pub wait: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Label {
    pub key: String,
    pub value: String,
}

impl Config {
    /// Returns the path of the kubeconfig, or `None` to use the service account of this service's pod.
    pub fn kubeconfig(&self) -> Option<&Path> {
        let is_given = !self.kubeconfig.as_os_str().is_empty();
        is_given.then_some(&self.kubeconfig)
    }

    pub fn modes(&self) -> Modes {
        Modes {
            repair: self.repair_pods,
            label: self.label_pods,
            delete: self.delete_pods,
            wait: Duration::from_secs(self.repair_wait_seconds.into()),
        }
    }

    pub fn changes_per_minute(&self) -> NonZeroU16 {
        self.changes_per_minute
    }

    /// Returns the length of an absence of pod-events after which conditions become Unknown, or `None` for never.
    pub fn unknown_after(&self) -> Option<Duration> {
        let time = Duration::from_secs(self.unknown_after_seconds.into());
        Some(time).filter(|time| !time.is_zero())
    }

    /// Returns the criteria by which the status of a pod shows missing redirection.
    pub fn criteria(&self) -> Criteria {
        let given = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
        Criteria {
            annotation: given(&self.sidecar_annotation),
            container: given(&self.init_container_name),
            message: given(&self.init_container_termination_message),
            exit_code: Some(self.init_container_exit_code.into()).filter(|code| *code != 0),
        }
    }

    pub fn label(&self) -> Label {
        Label {
            key: self.broken_pod_label_key.clone(),
            value: self.broken_pod_label_value.clone(),
        }
    }

    /// Returns the field selectors of the watch, which always include this node.
    pub fn fields(&self) -> String {
        let own = format!("spec.nodeName={}", self.node_name);
        match self.field_selectors.trim() {
            "" => own,
            more => format!("{more},{own}"),
        }
    }

    /// Returns the label selectors of the watch, or `None` to watch all pods.
    pub fn labels(&self) -> Option<&str> {
        Some(self.label_selectors.trim()).filter(|text| !text.is_empty())
    }
}

fn rate<'de, D: Deserializer<'de>>(deserializer: D) -> Result<NonZeroU16, D::Error> {
    let number = u16::deserialize(deserializer)?;
    let rate = NonZeroU16::new(number).filter(|rate| rate.get() <= 600);
    rate.ok_or_else(|| D::Error::custom(format!("{number} is not in 1 to 600")))
}

fn exit_code<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u8, D::Error> {
    let code = u16::deserialize(deserializer)?;
    u8::try_from(code).map_err(|_| D::Error::custom(format!("{code} is not in 0 to 255")))
}

/// Checks the name of the label at startup, including the prefix: the API server would refuse every patch with an
/// invalid name.
fn label_key<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    check_label(deserializer, "name", |text| match text.split_once('/') {
        Some((prefix, name)) => is_dns_subdomain(prefix) && is_label_name(name),
        None => is_label_name(text),
    })
}

fn label_value<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let is_valid = |text: &str| text.is_empty() || is_label_name(text);
    check_label(deserializer, "value", is_valid)
}

fn check_label<'de, D: Deserializer<'de>>(
    deserializer: D,
    part: &str,
    is_valid: impl Fn(&str) -> bool,
) -> Result<String, D::Error> {
    let text = String::deserialize(deserializer)?;
    if is_valid(&text) {
        return Ok(text);
    }
    Err(D::Error::custom(format!(
        "\"{text}\" is not a valid label {part} (Kubernetes, \"Labels and Selectors\")"
    )))
}

/// Accepts 1 to 63 letters, digits, `-`, `_` and `.`, with a letter or a digit at both ends.
fn is_label_name(text: &str) -> bool {
    text.len() <= 63 && is_cni_name(text) && text.ends_with(|c: char| c.is_ascii_alphanumeric())
}

#[cfg(test)]
pub(crate) mod tests {
    use serde_json::{Map, Value, json};

    use super::*;

    pub(crate) fn config(settings: &[(&str, Value)]) -> Result<Config, String> {
        let of_text = |text: &str| match text.parse::<u32>() {
            Ok(number) => json!(number),
            Err(_) => text
                .parse::<bool>()
                .map_or_else(|_| json!(text), Value::Bool),
        };
        let texts = ["broken_pod_label_value"];
        let mut all: Map<String, Value> = KEYS
            .iter()
            .filter_map(|key| {
                let text = key.default?;
                let value = if texts.contains(&key.name) {
                    json!(text)
                } else {
                    of_text(text)
                };
                Some((key.name.to_owned(), value))
            })
            .collect();
        all.insert("node_name".to_owned(), json!("node-1"));
        all.extend(
            settings
                .iter()
                .map(|(name, value)| ((*name).to_owned(), value.clone())),
        );
        serde_json::from_value(Value::Object(all)).map_err(|error| error.to_string())
    }

    #[test]
    fn outside_of_any_chart_pods_are_repaired_in_place_and_neither_labelled_nor_deleted() {
        let modes = config(&[]).unwrap().modes();
        let wanted = Modes {
            repair: true,
            label: false,
            delete: false,
            wait: Duration::from_secs(30),
        };
        assert_eq!(modes, wanted);
    }

    #[test]
    fn pods_are_those_of_the_node_whatever_else_is_selected() {
        let plain = config(&[]).unwrap();
        assert_eq!(
            (plain.fields().as_str(), plain.labels()),
            ("spec.nodeName=node-1", None)
        );
        let more = config(&[
            ("field_selectors", json!("status.phase=Pending")),
            ("label_selectors", json!(" app in (a,b) ")),
        ])
        .unwrap();
        assert_eq!(more.fields(), "status.phase=Pending,spec.nodeName=node-1");
        assert_eq!(more.labels(), Some("app in (a,b)"));
        assert!(
            config(&[("node_name", json!(""))]).is_err(),
            "the pods of no node"
        );
    }

    #[test]
    fn what_is_empty_or_zero_means_any() {
        let empty = ["sidecar_annotation", "init_container_name"].map(|name| (name, json!("")));
        let any = config(&[&empty[..], &[("init_container_exit_code", json!(0))]].concat());
        let Criteria {
            annotation,
            container,
            message,
            exit_code,
        } = any.unwrap().criteria();
        assert_eq!(
            (annotation, container, message, exit_code),
            (None, None, None, None)
        );
        let away = |seconds: u32| config(&[("unknown_after_seconds", json!(seconds))]);
        assert_eq!(away(0).unwrap().unknown_after(), None);
        let minute = Some(Duration::from_secs(60));
        assert_eq!(away(60).unwrap().unknown_after(), minute);
        let usual = config(&[]).unwrap().criteria();
        assert_eq!(usual.container.as_deref(), Some("istio-validation"));
        assert_eq!(usual.exit_code, Some(126));
    }

    #[test]
    fn a_label_that_the_api_server_would_refuse_is_refused_at_the_start() {
        for (name, value) in [
            ("broken_pod_label_key", json!("")),
            ("broken_pod_label_key", json!("a b")),
            ("broken_pod_label_key", json!("a/b/c")),
            ("broken_pod_label_key", json!("/b")),
            ("broken_pod_label_key", json!("A.example/b")),
            ("broken_pod_label_key", json!("x".repeat(64))),
            ("broken_pod_label_value", json!("-x")),
            ("broken_pod_label_value", json!("a b")),
            ("init_container_exit_code", json!(256)),
            ("changes_per_minute", json!(0)),
            ("changes_per_minute", json!(601)),
        ] {
            assert!(config(&[(name, value.clone())]).is_err(), "{name} {value}");
        }
        for key in ["broken", "a.example/b_c.d"] {
            assert!(
                config(&[("broken_pod_label_key", json!(key))]).is_ok(),
                "{key}"
            );
        }
        assert!(config(&[("broken_pod_label_value", json!(""))]).is_ok());
    }
}
