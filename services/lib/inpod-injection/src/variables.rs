//! A closed list of variables (README.md), whose values are computed before rendering.

mod networks;
mod pod;
mod proxy;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::LazyLock,
};

use serde_json::Value;

use crate::{Request, config::Config, error::InjectError, proxy::ProxySettings};

/// The names of all variables, taken from a pod without content, because every pod has the same variables.
pub(crate) static NAMES: LazyLock<BTreeSet<&str>> = LazyLock::new(|| {
    let (config, pod) = (Config::default(), Value::Null);
    let request = Request {
        pod: &pod,
        namespace: "",
        environment: &[],
    };
    let proxy = ProxySettings::of(&config, &pod);
    let variables = proxy.and_then(|proxy| Variables::gather(&config, &proxy, &pod, &request));
    variables.map_or_else(|_| BTreeSet::new(), |it| it.values.into_keys().collect())
});

/// The values of the variables, null for unset variables.
#[derive(Clone, Debug, PartialEq)]
pub struct Variables {
    values: BTreeMap<&'static str, Value>,
    annotations: BTreeMap<String, String>,
    labels: BTreeMap<String, String>,
}

impl Variables {
    /// Computes all values from the author's pod and the request.
    ///
    /// # Errors
    ///
    /// Fails if the pod's list of ports or of Multus networks is invalid.
    pub fn gather(
        config: &Config,
        proxy: &ProxySettings,
        original: &Value,
        request: &Request<'_>,
    ) -> Result<Self, InjectError> {
        let mut values = BTreeMap::new();
        values.extend(pod::of_pod(original, request));
        values.extend(pod::of_workload(original, request));
        values.extend(pod::of_interception(original, proxy)?);
        values.extend(networks::of_networks(config, original)?);
        values.extend(proxy::of_proxy(config, proxy, original));
        values.extend(proxy::of_mesh(config));
        let map = |key| {
            let found = original
                .get("metadata")
                .and_then(|metadata| metadata.get(key));
            let texts = found.and_then(Value::as_object).into_iter().flatten();
            let text =
                |(key, value): (&String, &Value)| Some((key.clone(), value.as_str()?.to_owned()));
            texts.filter_map(text).collect()
        };
        Ok(Self {
            values,
            annotations: map("annotations"),
            labels: map("labels"),
        })
    }

    /// Returns the value, or `None` if unset. Parsing the template has checked that the name is known.
    pub fn get(&self, name: &str) -> Option<Value> {
        if let Some(key) = name.strip_prefix("annotation:") {
            return self.annotations.get(key).map(|text| text.as_str().into());
        }
        if let Some(key) = name.strip_prefix("label:") {
            return self.labels.get(key).map(|text| text.as_str().into());
        }
        self.values
            .get(name)
            .filter(|value| !value.is_null())
            .cloned()
    }
}

/// Returns whether templates may use a variable of this name.
pub fn is_known(name: &str) -> bool {
    let mut of_pod = ["annotation:", "label:"].into_iter();
    let of_pod = of_pod.find_map(|kind| name.strip_prefix(kind));
    of_pod.map_or_else(|| NAMES.contains(name), |key| !key.is_empty())
}

type Pairs<const N: usize> = [(&'static str, Value); N];

fn some(text: &str) -> Value {
    if text.is_empty() {
        Value::Null
    } else {
        text.into()
    }
}
