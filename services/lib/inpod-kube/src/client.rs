//! The configuration of clients for the API server.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use kube::{
    Config,
    config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError},
};

/// The time in which the API server has to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The time without received data after which a connection counts as dead. An idle watch is silent for a shorter time.
/// The limit is the last resort for connections that nothing else supervises.
const READ_TIMEOUT: Duration = Duration::from_secs(90);

#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The pod has no usable service account.
    #[error(
        "cannot reach Kubernetes with the pod's service account; name a file in the setting kubeconfig"
    )]
    ServiceAccount(#[source] InClusterError),
    /// The kubeconfig file is unreadable or incomplete.
    #[error("setting kubeconfig: cannot use {}", .path.display())]
    Kubeconfig {
        path: PathBuf,
        source: KubeconfigError,
    },
    /// The keys, certificates or proxy of the configuration are unusable.
    #[error("cannot create a Kubernetes client from {from}")]
    Client {
        /// The source of the configuration, for the message.
        from: String,
        source: kube::Error,
    },
}

impl ClientError {
    pub fn from_kubeconfig(kubeconfig: Option<&Path>) -> impl FnOnce(kube::Error) -> Self {
        let from = match kubeconfig {
            None => "the pod's service account".to_owned(),
            Some(path) => path.display().to_string(),
        };
        |source| Self::Client { from, source }
    }
}

/// Uses the pod's service account or a kubeconfig, without connecting. Only a kubeconfig may name a proxy, because a
/// variable such as `HTTPS_PROXY` on the node must not redirect an agent.
///
/// # Errors
///
/// Fails if there is no service account, or if the kubeconfig is unusable.
pub async fn client_config(kubeconfig: Option<&Path>) -> Result<Config, ClientError> {
    let mut config = match kubeconfig {
        None => in_cluster_config()?,
        Some(path) => kubeconfig_from_file(path).await?,
    };
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    config.read_timeout = Some(READ_TIMEOUT);
    config.reset_reader_on_write = true;
    // Callers have deadlines, so that an error message is worth more than a second attempt.
    config.default_retry = false;
    Ok(config)
}

fn in_cluster_config() -> Result<Config, ClientError> {
    let mut config = Config::incluster().map_err(ClientError::ServiceAccount)?;
    config.proxy_url = None;
    Ok(config)
}

async fn kubeconfig_from_file(path: &Path) -> Result<Config, ClientError> {
    let failed = |source| ClientError::Kubeconfig {
        path: path.to_owned(),
        source,
    };
    let file = Kubeconfig::read_from(path).map_err(failed)?;
    let names_proxy = file.clusters.iter().any(|cluster| {
        let cluster = cluster.cluster.as_ref();
        cluster.is_some_and(|cluster| cluster.proxy_url.is_some())
    });
    let context = KubeConfigOptions::default();
    let config = Config::from_custom_kubeconfig(file, &context);
    let mut config = config.await.map_err(failed)?;
    if !names_proxy {
        config.proxy_url = None;
    }
    Ok(config)
}
