//! Merges containers that both template and pod declare, where the pod's fields win
//! (services/docs/facts/istio-sidecar.md, 6.4 step 8).

use inpod_types::keys;
use serde_json::{Value, json};

use crate::{
    is_proxy,
    json::{self, CONTAINER_LISTS},
    merge,
    proxy::ProxySettings,
};

/// The placeholder in a pod for the image of the template.
const AUTO: &str = "auto";

/// The containers as the pod declares them, each with the name of its list.
#[derive(Debug)]
pub(crate) struct Declared(Vec<(&'static str, Value)>);

/// Removes rendered volumes that the pod has, too, because volumes of the same name belong to the pod's containers.
pub(crate) fn without_own_volumes(mut rendered: Value, original: &Value) -> Value {
    let own = json::containers(original, "volumes");
    let is_own = |volume: &Value| own.iter().any(|it| json::name(it) == json::name(volume));
    let volumes = rendered
        .pointer_mut("/spec/volumes")
        .and_then(Value::as_array_mut);
    if let Some(volumes) = volumes {
        volumes.retain(|volume| !is_own(volume));
    }
    rendered
}

/// Collects the pod's own declarations of rendered containers. A native proxy declared among `containers` moves to
/// `initContainers`.
pub(crate) fn extract(
    pod: &mut Value,
    original: &Value,
    rendered: &Value,
    proxy: &ProxySettings,
) -> Declared {
    let names: Vec<_> = json::all_containers(rendered)
        .filter_map(|(_, it)| json::name(it))
        .collect();
    let declared = json::all_containers(original)
        .filter(|(_, it)| json::name(it).is_some_and(|name| names.contains(&name)))
        .map(|(list, it)| (list, it.clone()))
        .collect();
    let declared = Declared(declared);
    if proxy.is_native {
        move_declared_proxy(pod);
    }
    declared
}

fn move_declared_proxy(pod: &mut Value) {
    let Some(spec) = pod.get_mut("spec") else {
        return;
    };
    let Some(containers) = spec.get_mut("containers").and_then(Value::as_array_mut) else {
        return;
    };
    let (mut native, others): (Vec<_>, Vec<_>) =
        std::mem::take(containers).into_iter().partition(is_proxy);
    *containers = others;
    if native.is_empty() {
        return;
    }
    if let Some(init) = json::list_mut(spec, "initContainers") {
        init.append(&mut native);
    }
}

impl Declared {
    /// Merges the pod's declarations over the rendered templates, so that the declarations win.
    pub(crate) fn merged_over(&self, mut rendered: Value, proxy: &ProxySettings) -> Value {
        for (list, container) in &self.0 {
            let is_moved = proxy.is_native && is_proxy(container);
            let list = if is_moved { "initContainers" } else { list };
            let mut declared = container.clone();
            if let Some(fields) = declared.as_object_mut()
                && fields
                    .get("image")
                    .is_some_and(|image| image == AUTO || image == "")
            {
                fields.remove("image");
            }
            merge::merge(&mut rendered, &json!({"spec": {list: [declared]}}));
        }
        rendered
    }

    /// Writes the declarations into an annotation, from which the next injection restores the pod.
    pub(crate) fn write(&self, pod: &mut Value) {
        let of = |wanted: &str| {
            let of_list = self.0.iter().filter(|(list, _)| *list == wanted);
            of_list.map(|(_, it)| it.clone()).collect::<Vec<_>>()
        };
        let mut kept = serde_json::Map::new();
        for list in CONTAINER_LISTS {
            let containers = of(list);
            if !containers.is_empty() {
                kept.insert(list.to_owned(), containers.into());
            }
        }
        if !kept.is_empty() {
            json::annotate(pod, keys::OVERRIDES, &Value::from(kept).to_string());
        }
    }
}
