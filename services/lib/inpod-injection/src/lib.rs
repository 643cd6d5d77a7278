//! What is put into a pod that is to have a sidecar, as a value: no I/O, no Kubernetes, no clock.
//!
//! The steps are those of Istio's webhook, by their names (`README.md` has the table): [`Injector::inject`] asks
//! [`decide`] whether anything is to be done, checks the pod's annotations ([`annotations`]), gathers the facts and
//! renders the templates (`Injector::injection_data`), merges them into the pod ([`merge`]), but for what it would only
//! repeat ([`last_applied`]), leads scrapes and probes to the agent ([`prometheus`], [`probes`]), writes the status
//! ([`status`]), puts containers into their order ([`order`]), and says it all as a patch ([`patch::create`]).

pub mod annotations;
mod bootstrap;
pub mod config;
pub mod decide;
mod environment;
pub mod error;
pub mod files;
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

use inpod_types::keys;
use json_patch::Patch;
use serde_json::Value;

pub use config::{Config, InvalidConfig};
pub use decide::{Decision, SkipReason};
pub use error::InjectError;
pub use owner::Owner;

use crate::{
    proxy::{ISTIO_PROXY, ProxySettings},
    status::Status,
    template::{Conditions, Template},
    variables::Variables,
};

/// What is asked for.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The pod, or the template of one: an object with `metadata` and `spec`.
    pub pod: &'a Value,
    /// Its namespace; what the pod itself says comes first.
    pub namespace: &'a str,
    /// What makes it, where that is known otherwise than by the pod's owner references.
    pub owner: Option<&'a Owner>,
    /// Environment of the proxy besides, in order: that of the webhook's path.
    pub environment: &'a [(String, String)],
}

/// What came of it.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// The pod is left as it is.
    Skipped(SkipReason),
    /// The pod is to be changed; the patch is empty where it was injected before.
    Injected {
        /// The pod as it is to be.
        pod: Value,
        /// What leads to it.
        patch: Patch,
    },
}

/// Configuration and templates, ready for use.
#[derive(Clone, Debug)]
pub struct Injector {
    config: Config,
    templates: Vec<Named>,
}

/// A template by its name.
type Named = (String, Template);

impl Injector {
    /// Checks a configuration and reads its templates.
    ///
    /// # Errors
    ///
    /// When something cannot be used; the message names it, with the line of a template.
    pub fn new(config: Config) -> Result<Self, InvalidConfig> {
        config.check()?;
        let templates = template::all(&config)?;
        Ok(Self { config, templates })
    }

    /// What is configured.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What becomes of a pod. One that is not to be injected is not looked at any further, however malformed it is.
    ///
    /// # Errors
    ///
    /// When the pod is to be injected and cannot be: an annotation or a field of it is not as it should be.
    pub fn inject(&self, request: &Request<'_>) -> Result<Outcome, InjectError> {
        if let Decision::Skip(why) = decide::decide(&self.config, request.pod, request.namespace) {
            return Ok(Outcome::Skipped(why));
        }
        let pod = self.injected(request)?;
        let patch = patch::create(request.pod, &pod);
        Ok(Outcome::Injected { pod, patch })
    }

    fn injected(&self, request: &Request<'_>) -> Result<Value, InjectError> {
        json::check_pod(request.pod)?;
        annotations::check(request.pod)?;
        // What is templated looks at the pod as its author wrote it; what is merged into is the pod as it came.
        let original = revert::strip(request.pod);
        let templates = self.selected(&original)?;
        let mut proxy = ProxySettings::of(&self.config, &original)?;
        let bootstrap = self.bootstrap(&templates, &original, &mut proxy)?;
        let variables = Variables::gather(&self.config, &proxy, &original, request)?;
        let rendered = self.injection_data(&templates, &proxy, &variables, bootstrap.as_deref())?;
        let rendered =
            overrides::without_own_volumes(proxy::move_native(rendered, &proxy), &original);
        let mut pod = request.pod.clone();
        let declared = overrides::extract(&mut pod, &original, &rendered, &proxy);
        let over = declared.merged_over(rendered, &proxy);
        let new = last_applied::without_repeated(over.clone(), &pod);
        merge::merge(&mut pod, &new);
        declared.write(&mut pod);
        proxy::align_users(&mut pod, &original, &proxy);
        environment::set(&mut pod, &self.config, &proxy, request.environment);
        prometheus::merge(&mut pod, &original, &self.config, &proxy)?;
        probes::rewrite(&mut pod, &proxy)?;
        annotate(&mut pod, &self.config);
        Status::of(&over, &original, &pod, &self.config).write(&mut pod);
        order::containers(&mut pod, &proxy);
        Ok(pod)
    }

    /// The selected templates, rendered and merged in their order.
    fn injection_data(
        &self,
        templates: &[&Named],
        proxy: &ProxySettings,
        variables: &Variables,
        bootstrap: Option<&str>,
    ) -> Result<Value, InjectError> {
        let conditions = Conditions::of(&self.config, proxy);
        let mut rendered = Value::Object(serde_json::Map::new());
        for (name, template) in templates {
            let part = template.render(name, variables, &conditions, bootstrap)?;
            merge::merge(&mut rendered, &part);
        }
        Ok(rendered)
    }

    /// The bootstrap, where a template has it. The proxy has no agent then: probes stay as they are.
    fn bootstrap(
        &self,
        templates: &[&Named],
        original: &Value,
        proxy: &mut ProxySettings,
    ) -> Result<Option<String>, InjectError> {
        if !templates
            .iter()
            .any(|(_, it)| it.has(bootstrap::VARIABLE.0))
        {
            return bootstrap::reject_endpoints(original).map(|()| None);
        }
        proxy.status_port = 0;
        bootstrap::render(original, proxy, self.config.proxy.ipv6).map(Some)
    }

    /// The pod's templates, aliases replaced.
    fn selected(&self, original: &Value) -> Result<Vec<&Named>, InjectError> {
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
        names.map(|name| self.template(name)).collect()
    }

    fn template(&self, name: String) -> Result<&Named, InjectError> {
        let named = self.templates.iter().find(|(known, _)| *known == name);
        named.ok_or(InjectError::UnknownTemplate(name))
    }
}

/// Annotations that the configuration gives to every pod.
fn annotate(pod: &mut Value, config: &Config) {
    for (name, value) in &config.injected_annotations {
        json::annotate(pod, name, value);
    }
}

/// Whether a container is the proxy.
fn is_proxy(container: &Value) -> bool {
    json::name(container) == Some(ISTIO_PROXY)
}

/// The proxy's container of a pod.
fn proxy_of(pod: &Value) -> Option<&Value> {
    let mut all = json::all_containers(pod).map(|(_, it)| it);
    all.find(|it| is_proxy(it))
}
