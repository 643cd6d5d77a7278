//! Computes the injection of a sidecar into a pod, without I/O, Kubernetes client or clock.
//!
//! The steps have the names of Istio's webhook (`README.md` has the table): [`Injector::inject`] decides
//! ([`decide`]), validates annotations ([`annotations`]), collects variables and renders templates
//! (`Injector::injection_data`), merges them ([`merge`]) except for repeated values ([`last_applied`]), redirects
//! scrapes and probes ([`prometheus`], [`probes`]), writes the status ([`status`]), orders containers ([`order`]) and
//! computes the patch ([`patch::create`]).

pub mod annotations;
pub mod config;
pub mod decide;
mod environment;
pub mod error;
mod json;
pub mod last_applied;
pub mod merge;
pub mod order;
mod overrides;
pub mod owner;
pub mod patch;
pub mod probes;
pub mod prometheus;
pub mod proxy;
pub mod revert;
pub mod selector;
pub mod status;
pub mod template;
pub mod variables;

use std::collections::HashSet;

use inpod_types::keys;
use json_patch::Patch;
use serde_json::Value;

pub use config::{Config, InvalidConfig};
pub use decide::{Decision, SkipReason};
pub use error::InjectError;
pub use json::parse_pod;

use crate::{
    proxy::{ISTIO_PROXY, ProxySettings},
    status::Status,
    template::{Conditions, Template},
    variables::Variables,
};

#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// A pod, with `metadata` and `spec`.
    pub pod: &'a Value,
    /// The namespace of the request, used unless the pod has a namespace.
    pub namespace: &'a str,
    /// Environment variables for the proxy, from the path of the webhook.
    pub environment: &'a [(String, String)],
}

#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    Skipped(SkipReason),
    /// The pod is injected; the patch is empty if the pod was injected before.
    Injected {
        /// The pod after the injection, with all changes.
        pod: Value,
        patch: Patch,
    },
}

#[derive(Clone, Debug)]
pub struct Injector {
    config: Config,
    templates: Vec<NamedTemplate>,
}

type NamedTemplate = (String, Template);

impl Injector {
    /// Validates the configuration and the templates.
    ///
    /// # Errors
    ///
    /// Fails with the name of the field, or with the template and the line.
    pub fn new(config: Config) -> Result<Self, InvalidConfig> {
        config.check()?;
        let templates = template::all(&config)?;
        Ok(Self { config, templates })
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Injects the sidecar into a pod, unless the rules skip the pod. A skipped pod is not validated.
    ///
    /// # Errors
    ///
    /// Fails if an annotation or a field of the pod is invalid.
    pub fn inject(&self, request: &Request<'_>) -> Result<Outcome, InjectError> {
        if let Decision::Skip(why) = decide::decide(&self.config, request.pod, request.namespace) {
            return Ok(Outcome::Skipped(why));
        }
        let pod = self.inject_into(request)?;
        let patch = patch::create(request.pod, &pod);
        Ok(Outcome::Injected { pod, patch })
    }

    fn inject_into(&self, request: &Request<'_>) -> Result<Value, InjectError> {
        json::check_pod(request.pod)?;
        annotations::check(request.pod)?;
        // Templates read the author's pod, but are merged into the pod as it arrived.
        let original = revert::original_pod(request.pod);
        json::check_lists(&original)?;
        let templates = self.select_templates(&original)?;
        let proxy = ProxySettings::of(&self.config, &original)?;
        let variables = Variables::gather(&self.config, &proxy, &original, request)?;
        let rendered = self.injection_data(&templates, &proxy, &variables)?;
        let rendered =
            overrides::without_own_volumes(proxy::move_native(rendered, &proxy), &original);
        let mut pod = request.pod.clone();
        let declared = overrides::extract(&mut pod, &original, &rendered, &proxy);
        let overlay = declared.merged_over(rendered, &proxy);
        let applied = Status::read(&pod).unwrap_or_default().last_applied;
        let changed = last_applied::without_repeated(overlay.clone(), &pod, &applied);
        merge::merge(&mut pod, &changed);
        declared.write(&mut pod);
        proxy::align_users(&mut pod, &original, &proxy);
        environment::set(&mut pod, &self.config, &proxy, request.environment);
        prometheus::merge(&mut pod, &original, &self.config, &proxy)?;
        probes::rewrite(&mut pod, &proxy)?;
        set_configured_annotations(&mut pod, &self.config);
        Status::of(&overlay, &original, &pod, &self.config).write(&mut pod);
        order::containers(&mut pod, &proxy);
        Ok(pod)
    }

    /// Renders the selected templates in order, and merges the results.
    fn injection_data(
        &self,
        templates: &[&NamedTemplate],
        proxy: &ProxySettings,
        variables: &Variables,
    ) -> Result<Value, InjectError> {
        let conditions = Conditions::of(&self.config, proxy);
        let mut rendered = Value::Object(serde_json::Map::new());
        for (name, template) in templates {
            let part = template.render(name, variables, &conditions)?;
            merge::merge(&mut rendered, &part);
        }
        Ok(rendered)
    }

    /// Resolves the names and aliases of templates.
    fn select_templates(&self, original: &Value) -> Result<Vec<&NamedTemplate>, InjectError> {
        let requested = json::annotation(original, keys::TEMPLATES);
        let requested: Vec<String> = match requested {
            Some(names) => names
                .split(',')
                .map(|name| name.trim().to_owned())
                .collect(),
            None => self.config.default_templates.clone(),
        };
        let names = requested.into_iter().flat_map(|name| {
            let aliased = self.config.aliases.get(&name);
            aliased.cloned().unwrap_or_else(|| vec![name])
        });
        let mut seen = HashSet::new();
        // Rendering a template again would change nothing.
        let names = names.filter(|name| seen.insert(name.clone()));
        names.map(|name| self.find_template(name)).collect()
    }

    fn find_template(&self, name: String) -> Result<&NamedTemplate, InjectError> {
        let named = self.templates.iter().find(|(known, _)| *known == name);
        named.ok_or(InjectError::UnknownTemplate(name))
    }
}

fn set_configured_annotations(pod: &mut Value, config: &Config) {
    for (name, value) in &config.injected_annotations {
        json::annotate(pod, name, value);
    }
}

fn is_proxy(container: &Value) -> bool {
    json::name(container) == Some(ISTIO_PROXY)
}

fn proxy_container(pod: &Value) -> Option<&Value> {
    let mut all = json::all_containers(pod).map(|(_, it)| it);
    all.find(|it| is_proxy(it))
}
