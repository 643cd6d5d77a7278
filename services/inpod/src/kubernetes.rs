//! Kubernetes, asked with the rights of whoever runs this.

use std::{fmt, path::Path, time::Duration};

use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};

use crate::error::AskError;

/// How long the API server may take to answer.
pub(crate) const ANSWER: Duration = Duration::from_secs(15);

pub(crate) fn failed(what: &str, cause: &dyn fmt::Display) -> AskError {
    AskError::Kubernetes {
        what: what.to_owned(),
        cause: cause.to_string(),
    }
}

/// A client, and the namespace of its context. Without a file as kubectl does, or as the pod's service account.
pub(crate) async fn reach(kubeconfig: Option<&Path>) -> Result<(Client, String), AskError> {
    let mut config = config(kubeconfig).await?;
    config.connect_timeout = Some(Duration::from_secs(5));
    config.read_timeout = Some(ANSWER);
    let namespace = config.default_namespace.clone();
    let client = Client::try_from(config);
    let client = client.map_err(|error| failed("make a client of Kubernetes", &error))?;
    Ok((client, namespace))
}

async fn config(kubeconfig: Option<&Path>) -> Result<Config, AskError> {
    let Some(path) = kubeconfig else {
        let config = Config::infer().await;
        return config.map_err(|error| failed("find out how to reach Kubernetes", &error));
    };
    let what = format!("use {}", path.display());
    let file = Kubeconfig::read_from(path).map_err(|error| failed(&what, &error))?;
    let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await;
    config.map_err(|error| failed(&what, &error))
}
