//! How the API server is reached.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use kube::{
    Client, Config,
    client::ClientBuilder,
    config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError},
};
use tower::util::MapResponseLayer;

use super::pace::Pace;

/// How long the API server may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(5);

/// How long it may be silent on a connection: longer than a watch that has nothing to tell lasts, so that this is the
/// last resort for a connection that nobody looks after.
const SILENCE: Duration = Duration::from_secs(90);

/// Why it cannot be known how to reach Kubernetes.
#[derive(Debug, thiserror::Error)]
pub enum KubernetesError {
    /// There is no service account in this pod.
    #[error(
        "setting pods_from: cannot reach Kubernetes as a pod's service account; give a file with the setting kubeconfig"
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

/// An API server that can be asked.
#[derive(Clone)]
pub(in crate::source) struct Reached {
    pub(super) client: Client,
    /// When it wants to be asked again.
    pub(super) pace: Pace,
}

/// A client, without asking anybody yet. No proxy is used but one that the kubeconfig names, which this build refuses:
/// a variable like `HTTPS_PROXY` that a node's pods happen to have must not lead the agent astray.
pub(in crate::source) async fn client(
    kubeconfig: Option<&Path>,
) -> Result<Reached, KubernetesError> {
    let (mut config, from) = match kubeconfig {
        None => {
            let config = Config::incluster().map_err(KubernetesError::ServiceAccount)?;
            (config, "the pod's service account".to_owned())
        }
        Some(path) => (of_file(path).await?, path.display().to_string()),
    };
    config.connect_timeout = Some(CONNECT);
    config.read_timeout = Some(SILENCE);
    config.reset_reader_on_write = true;
    // Whoever asks has a deadline, and an answer in words is worth more than a second attempt.
    config.default_retry = false;
    let builder = ClientBuilder::try_from(config);
    let builder = builder.map_err(|source| KubernetesError::Client { from, source })?;
    let pace = Pace::default();
    let reads = pace.clone();
    let layer = MapResponseLayer::new(move |answer: http::Response<_>| {
        reads.read(&answer);
        answer
    });
    let client = builder.with_layer(&layer).build();
    Ok(Reached { client, pace })
}

async fn of_file(path: &Path) -> Result<Config, KubernetesError> {
    let failed = |source| KubernetesError::Kubeconfig {
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
