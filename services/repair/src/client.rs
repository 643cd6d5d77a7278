//! How the API server is reached.

use std::{path::Path, time::Duration};

use kube::{
    Client, Config,
    client::ClientBuilder,
    config::{KubeConfigOptions, Kubeconfig},
};

use crate::error::ClientError;

/// How long the API server may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(5);

/// How long it may be silent on a connection: longer than a watch that has nothing to tell lasts.
const SILENCE: Duration = Duration::from_secs(90);

/// A client, without asking anybody yet. No proxy is used but one that the kubeconfig names: a variable like
/// `HTTPS_PROXY` that a node's pods happen to have must not lead the agent astray.
pub(crate) async fn client(kubeconfig: Option<&Path>) -> Result<Client, ClientError> {
    let mut config = match kubeconfig {
        None => {
            let mut config = Config::incluster().map_err(ClientError::ServiceAccount)?;
            config.proxy_url = None;
            config
        }
        Some(path) => of_file(path).await?,
    };
    config.connect_timeout = Some(CONNECT);
    config.read_timeout = Some(SILENCE);
    config.reset_reader_on_write = true;
    // Whoever asks has a deadline and comes back.
    config.default_retry = false;
    let builder = ClientBuilder::try_from(config).map_err(ClientError::Client)?;
    Ok(builder.build())
}

async fn of_file(path: &Path) -> Result<Config, ClientError> {
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
    let mut config = Config::from_custom_kubeconfig(file, &context)
        .await
        .map_err(failed)?;
    if !names_proxy {
        config.proxy_url = None;
    }
    Ok(config)
}
