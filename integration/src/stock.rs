//! Runs a stock ztunnel (istio/ztunnel, built with its feature `testing`) without a control plane, configured by a
//! file, and parses its log.

use std::{
    fs,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use serde_json::Value;

use crate::{Node, Pod, Spec, run};

/// The variable that names the stock ztunnel program.
pub const STOCK_ZTUNNEL: &str = "ZTUNNEL";

/// A command line that gives a ztunnel its own network namespace, as a ztunnel pod has: ztunnel's own ports (15000,
/// 15020, 15021) exist once per ztunnel.
const APART: [&str; 5] = [
    "unshare",
    "--net",
    "sh",
    "-c",
    "ip link set lo up && exec \"$0\" \"$@\"",
];

/// A connection of a stock ztunnel, which logs the connection at its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Carried {
    pub is_outbound: bool,
    pub source: SocketAddr,
    /// Set if proven by mTLS.
    pub source_identity: Option<String>,
    /// The destination, which has the HBONE port or the port of the application.
    pub destination: SocketAddr,
    /// The destination within the HBONE tunnel.
    pub hbone: Option<SocketAddr>,
    /// Set if proven by mTLS.
    pub destination_identity: Option<String>,
    pub error: Option<String>,
}

impl Carried {
    /// Parses a line of the log; returns `None` if the line is not about a connection.
    pub fn parse(line: &str) -> Option<Self> {
        let line: Value = serde_json::from_str(line).ok()?;
        let text = |name: &str| line.get(name).and_then(Value::as_str).map(str::to_owned);
        let address = |name: &str| text(name)?.parse().ok();
        (text("scope")? == "access").then_some(())?;
        Some(Self {
            is_outbound: text("direction")? == "outbound",
            source: address("src.addr")?,
            source_identity: text("src.identity"),
            destination: address("dst.addr")?,
            hbone: address("dst.hbone_addr"),
            destination_identity: text("dst.identity"),
            error: text("error"),
        })
    }
}

pub fn stock_ztunnel() -> anyhow::Result<PathBuf> {
    let path = std::env::var_os(STOCK_ZTUNNEL).map(PathBuf::from);
    let path = path.with_context(|| {
        format!("{STOCK_ZTUNNEL} names a stock ztunnel that was built with its feature testing")
    })?;
    anyhow::ensure!(path.is_file(), "{} is missing", path.display());
    Ok(path)
}

/// Returns the description of a pod by a control plane, in YAML (ztunnel's `LocalWorkload`;
/// services/docs/facts/ztunnel.md, 2). Pods in the mesh are reached by HBONE. A service has one pod.
fn workload(node: &str, pod: &Pod, services: &[(&str, IpAddr)]) -> String {
    let Spec {
        namespace, name, ..
    } = &pod.spec;
    let is_ambient = pod.spec.mode.as_deref() == Some("ambient");
    let protocol = if is_ambient { "HBONE" } else { "TCP" };
    let of = services.iter().filter(|(service, _)| service == name);
    let services: String = of
        .map(|(service, _)| format!("\"{namespace}/{}\": {{80: 8080}}", hostname(service)))
        .collect();
    format!(
        "- uid: Kubernetes//v1/Pod/{namespace}/{name}\n  name: {name}\n  namespace: {namespace}\n  \
         serviceAccount: sa-{name}\n  trustDomain: cluster.local\n  workloadIps: [\"{}\", \"{}\"]\n  \
         protocol: {protocol}\n  node: {node}\n  network: \"\"\n  services: {{{services}}}\n",
        pod.v4, pod.v6
    )
}

fn hostname(service: &str) -> String {
    format!("{service}.shop.svc.cluster.local")
}

/// Returns the description of a service in `shop`: port 80 at its address leads to port 8080 of the pod with the same
/// name.
fn service((name, address): &(&str, IpAddr)) -> String {
    let hostname = hostname(name);
    format!(
        "- {{name: {name}, namespace: shop, hostname: {hostname}, vips: [\"/{address}\"], ports: {{80: 8080}}, \
         canonical: true}}\n"
    )
}

impl Node {
    fn local_xds(&self) -> PathBuf {
        self.run_dir().with_file_name("xds.yaml")
    }

    /// Writes the file that replaces a control plane, with these pods, and services by name and address. A ztunnel
    /// reads the file once, at its start.
    pub fn configure_stock_ztunnels(
        &self,
        pods: &[&Pod],
        services: &[(&str, IpAddr)],
    ) -> anyhow::Result<()> {
        let workload = |pod: &&Pod| workload(self.name(), pod, services);
        let workloads: String = pods.iter().map(workload).collect();
        let services: String = services.iter().map(service).collect();
        let text = format!("workloads:\n{workloads}services:\n{services}");
        let path = self.local_xds();
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Starts a stock ztunnel under its own name, through the command line `within`.
    pub fn start_stock_ztunnel(&self, within: &[&str], name: &str) -> anyhow::Result<()> {
        let program = stock_ztunnel()?;
        let (socket, xds) = (self.zds_socket(), self.local_xds());
        let environment: [(&str, &Path); 10] = [
            ("PROXY_MODE", "shared".as_ref()),
            ("INPOD_UDS", &socket),
            ("FAKE_CA", "true".as_ref()),
            ("XDS_ADDRESS", "".as_ref()),
            ("LOCAL_XDS_PATH", &xds),
            ("NODE_NAME", self.name().as_ref()),
            ("CLUSTER_ID", "Kubernetes".as_ref()),
            // Istio's chart sets this variable, too; backtraces make refusals longer.
            ("RUST_BACKTRACE", "1".as_ref()),
            ("LOG_FORMAT", "json".as_ref()),
            ("TERMINATION_GRACE_PERIOD_SECONDS", "30".as_ref()),
        ];
        let within: Vec<_> = within.iter().copied().chain(APART).collect();
        self.start_program(&within, name, &program, &["proxy", "ztunnel"], &environment)
    }

    pub fn carried_by(&self, name: &str) -> Vec<Carried> {
        let log = self.tail(name, usize::MAX);
        log.lines().filter_map(Carried::parse).collect()
    }

    /// Sends a request to one of ztunnel's own ports, which exist only in ztunnel's network namespace.
    pub fn ask_stock_ztunnel(&self, name: &str, at: &str) -> anyhow::Result<String> {
        let netns = format!("--net=/proc/{}/ns/net", self.pid(name)?);
        let url = format!("http://localhost:{at}");
        run("nsenter", &[&netns, "curl", "-sSf", "-m", "5", &url])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_access_log_is_told_from_others() {
        let line = r#"{"level":"info","time":"t","scope":"access","message":"connection complete","src.addr":"10.77.0.2:60572",
            "src.workload":"client","src.identity":"spiffe://cluster.local/ns/shop/sa/sa-client","dst.addr":"10.77.0.3:15008",
            "dst.hbone_addr":"10.77.0.3:8080","direction":"inbound","bytes_sent":165}"#;
        let carried = Carried::parse(line).unwrap();
        assert!(!carried.is_outbound && carried.error.is_none());
        assert_eq!(carried.hbone.map(|to| to.port()), Some(8080));
        assert_eq!(carried.destination_identity, None);
        let other = line.replace(r#""scope":"access""#, r#""scope":"inpod""#);
        assert!(Carried::parse(&other).is_none() && Carried::parse("Error").is_none());
    }
}
