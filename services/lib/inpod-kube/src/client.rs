//! Where the API server is, and as whom it is asked.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use kube::{
    Config,
    config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError},
};

/// How long the API server may take to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// How long it may be silent on a connection: longer than a watch that has nothing to tell lasts, so that this is the
/// last resort for a connection that nobody looks after.
const READ_TIMEOUT: Duration = Duration::from_secs(90);

/// Why it cannot be known how to reach Kubernetes.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// There is no service account in this pod.
    #[error(
        "cannot reach Kubernetes as a pod's service account; give a file with the setting kubeconfig"
    )]
    ServiceAccount(#[source] InClusterError),
    /// A kubeconfig that cannot be read or says too little.
    #[error("setting kubeconfig: cannot use {}", .path.display())]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: KubeconfigError,
    },
    /// Keys, certificates or a proxy that cannot be used.
    #[error("cannot make a client of Kubernetes from {from}")]
    Client {
        /// Where its settings are from.
        from: String,
        /// The cause.
        source: kube::Error,
    },
}

impl ClientError {
    /// For what a client cannot be made of: where [`client_config`] had it from.
    pub fn from_kubeconfig(kubeconfig: Option<&Path>) -> impl FnOnce(kube::Error) -> Self {
        let from = match kubeconfig {
            None => "the pod's service account".to_owned(),
            Some(path) => path.display().to_string(),
        };
        |source| Self::Client { from, source }
    }
}

/// What to make a client of: as a pod's service account, or as a kubeconfig says. Nobody is asked yet. No proxy is used
/// but one that the kubeconfig names: a variable like `HTTPS_PROXY` that a node's pods happen to have must not lead an
/// agent astray.
///
/// # Errors
///
/// When there is no service account, or the kubeconfig cannot be used.
pub async fn client_config(kubeconfig: Option<&Path>) -> Result<Config, ClientError> {
    let mut config = match kubeconfig {
        None => in_cluster_config()?,
        Some(path) => kubeconfig_from_file(path).await?,
    };
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    config.read_timeout = Some(READ_TIMEOUT);
    config.reset_reader_on_write = true;
    // Whoever asks has a deadline, and an answer in words is worth more than a second attempt.
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
