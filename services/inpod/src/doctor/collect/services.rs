use std::collections::BTreeMap;

use tokio::{net::UnixStream, time::timeout};

use super::{
    super::facts::{Process, Service},
    OPTIONAL_SERVICES, QUERY_TIMEOUT, SERVICES,
    process::process,
    state::inode,
};
use crate::{
    error::CommandError,
    host_fs::{HostFs, Observed},
    node::Node,
    status,
};

pub(super) async fn all(root: &HostFs, node: &Node, run_dir: &str) -> Vec<Service> {
    let [a, b, c, d] = SERVICES.map(|name| service(root, node, run_dir, name));
    let [e, f] = OPTIONAL_SERVICES.map(|name| service(root, node, run_dir, name));
    let (a, b, c, d, e, f) = tokio::join!(a, b, c, d, e, f);
    let is_here = |service: &Service| !matches!(service.directory, Ok(None));
    let optional = [e, f].into_iter().filter(is_here);
    [a, b, c, d].into_iter().chain(optional).collect()
}

async fn service(root: &HostFs, node: &Node, run_dir: &str, name: &'static str) -> Service {
    let directory = format!("{run_dir}/{name}");
    let socket = inode(root, &format!("{directory}/grpc.sock"));
    let mut service = Service {
        name,
        directory: inode(root, &directory),
        ready: Err("no socket".to_owned()),
        refuses: false,
        version: Err("no socket".to_owned()),
        conditions: BTreeMap::new(),
        process: Err("no socket".to_owned()),
        socket,
    };
    if !matches!(service.socket, Ok(Some(_))) {
        return service;
    }
    let (ready, metrics, peer) = tokio::join!(
        status::is_serving(node, name),
        metrics(node, name),
        peer(root, node, name)
    );
    service.refuses = ready.as_ref().is_err_and(CommandError::is_refusal);
    service.ready = ready.map_err(|error| error.first_line());
    service.version = metrics.clone().and_then(|text| version(&text));
    service.conditions = metrics.map(|text| conditions(&text)).unwrap_or_default();
    service.process = peer;
    service
}

pub(crate) async fn metrics(node: &Node, service: &str) -> Observed<String> {
    let socket = node.socket(service);
    match timeout(QUERY_TIMEOUT, inpod_service::metrics::fetch(&socket)).await {
        Ok(answer) => answer,
        Err(_elapsed) => Err(format!(
            "{}: no answer within {} s",
            socket.display(),
            QUERY_TIMEOUT.as_secs()
        )),
    }
}

/// Connects to a service's socket, and identifies the process that listens (unix(7), SO_PEERCRED).
async fn peer(root: &HostFs, node: &Node, service: &str) -> Observed<Process> {
    let stream = timeout(QUERY_TIMEOUT, UnixStream::connect(node.socket(service))).await;
    let stream = stream.map_err(|_elapsed| "connection not accepted in time".to_owned())?;
    let stream = stream.map_err(|error| error.to_string())?;
    let peer = stream.peer_cred().map_err(|error| error.to_string())?;
    match peer.pid() {
        Some(pid) if pid > 0 => Ok(process(root, pid)),
        Some(_) | None => Err(
            "its pid is not visible from here; run inpod in the node's pid namespace".to_owned(),
        ),
    }
}

/// Reads the version from the metric with the build information.
fn version(metrics: &str) -> Observed<String> {
    let line = metrics.lines().find(|line| line.contains("_build_info{"));
    let version = line.and_then(|line| label(line, "version"));
    version.ok_or_else(|| "no version in its metrics".to_owned())
}

fn label(line: &str, name: &str) -> Option<String> {
    let (_, rest) = line.split_once(&format!("{name}=\""))?;
    Some(rest.split('"').next()?.to_owned())
}

fn conditions(metrics: &str) -> BTreeMap<String, bool> {
    let lines = metrics
        .lines()
        .filter(|line| line.starts_with("inpod_") && line.contains("_condition{"));
    lines
        .filter_map(|line| Some((label(line, "name")?, line.ends_with(" 1"))))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_and_conditions_are_read_from_metrics() {
        let text = "# TYPE x info\ninpod_netconfig_build_info{version=\"1.2.3\"} 1\n\
                    inpod_netconfig_condition{name=\"apply\"} 1\ninpod_netconfig_condition{name=\"probe-set\"} 0\n";
        assert_eq!(version(text), Ok("1.2.3".to_owned()));
        let found: Vec<_> = conditions(text).into_iter().collect();
        assert_eq!(
            found,
            [("apply".to_owned(), true), ("probe-set".to_owned(), false)]
        );
        assert!(version("").is_err());
    }
}
