//! Reads from a rendered chart how the DaemonSet runs inpod.

use anyhow::Context as _;
use serde_json::Value;

/// The parts of the pod specification that concern one container.
#[derive(Clone, Debug)]
pub struct Container {
    pub name: String,
    /// The environment variables that have literal values.
    pub environment: Vec<(String, String)>,
    /// The capabilities, in the form of setpriv's `--bounding-set`.
    pub capabilities: String,
    /// The probes, each with its `periodSeconds`. The startup probe is left out, because it ends.
    pub probes: Vec<Value>,
}

/// Returns the containers of the DaemonSet in the manifest.
pub fn containers(manifest: &str) -> anyhow::Result<Vec<Container>> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(manifest)?;
    let is_daemonset =
        |document: &&Value| document.get("kind").and_then(Value::as_str) == Some("DaemonSet");
    let daemonset = documents.iter().find(is_daemonset);
    let containers = daemonset.and_then(|it| it.pointer("/spec/template/spec/containers"));
    let containers = containers.and_then(Value::as_array);
    let containers = containers.context("the manifest has no DaemonSet with containers")?;
    containers.iter().map(parse_container).collect()
}

fn parse_container(container: &Value) -> anyhow::Result<Container> {
    let items = |pointer| container.pointer(pointer).and_then(Value::as_array);
    let text = |value: &Value, key| value.get(key).and_then(Value::as_str).map(str::to_owned);
    let variables = items("/env").into_iter().flatten();
    let added = items("/securityContext/capabilities/add");
    let added = added.into_iter().flatten().filter_map(Value::as_str);
    let added = added.map(|name| format!(",+{}", name.to_lowercase()));
    let probes = ["readinessProbe", "livenessProbe"].into_iter();
    Ok(Container {
        name: text(container, "name").context("a container has a name")?,
        environment: variables
            .filter_map(|variable| Some((text(variable, "name")?, text(variable, "value")?)))
            .collect(),
        capabilities: added.fold("-all".to_owned(), |all, one| all + &one),
        probes: probes
            .filter_map(|probe| container.get(probe).cloned())
            .collect(),
    })
}
