//! Connects to Kubernetes with the rights of the user.

use std::{fmt, path::Path, time::Duration};

use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};

use crate::error::CommandError;

pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);

pub(crate) fn error(what: &str, cause: &dyn fmt::Display) -> CommandError {
    CommandError::Kubernetes {
        what: what.to_owned(),
        cause: cause.to_string(),
    }
}

/// Returns a client and the namespace of its context. Without a given file, finds the kubeconfig like kubectl does, or
/// uses the pod's service account.
pub(crate) async fn connect(kubeconfig: Option<&Path>) -> Result<(Client, String), CommandError> {
    let mut config = config(kubeconfig).await?;
    config.connect_timeout = Some(Duration::from_secs(5));
    config.read_timeout = Some(REQUEST_TIMEOUT);
    let namespace = config.default_namespace.clone();
    let client = Client::try_from(config);
    let client = client.map_err(|cause| error("create a Kubernetes client", &cause))?;
    Ok((client, namespace))
}

async fn config(kubeconfig: Option<&Path>) -> Result<Config, CommandError> {
    let Some(path) = kubeconfig else {
        let config = Config::infer().await;
        return config.map_err(|cause| error("find the Kubernetes configuration", &cause));
    };
    let what = format!("use {}", path.display());
    let file = Kubeconfig::read_from(path).map_err(|cause| error(&what, &cause))?;
    let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await;
    config.map_err(|cause| error(&what, &cause))
}
