//! The previous release, which helm upgrades, rolls back and uninstalls while connections go on.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
};

use anyhow::ensure;
use integration::{
    TIMEOUT, connect, eventually,
    kubernetes::{Image, PREVIOUS_VERSION, VERSION, previous},
};
use serde_json::{Value, json};

use crate::cluster::{
    agent::{ExclusiveCluster, SHIPPED, SYSTEM, named, on_the_node, uid},
    apps::{address, container, create, deploy, ready},
    chart::CHART,
    mesh::{assert_unbroken, serves_through_ztunnel, traffic},
    release::chain_is_the_primarys,
    repaired::peer,
    trace,
};

/// The values that the operator of the previous release set.
const SET: [&str; 2] = [
    "logging.level=debug",
    "podEvents.settings.drain_grace_seconds=7",
];

const KEEP: [&str; 1] = ["--reset-then-reuse-values"];

/// Answers with what it receives.
const ECHO: &str = "exec /bin/nc -ll -p 8080 -e /bin/cat";

/// Expects the agent and the plugin of a release, and the log level of the operator's values.
fn runs(cluster: &ExclusiveCluster<'_>, version: &str, level: &str) {
    cluster.until_whole();
    let images = cluster.images();
    let is_of = |image: &String| image.ends_with(&format!(":{version}"));
    assert!(images.iter().all(is_of), "{images:?}");
    eventually("plugin and chain are the release's", TIMEOUT, || {
        let plugin = ["/opt/cni/bin/inpod-cni", "--version"];
        let plugin = cluster.machine().exec(&plugin)?;
        ensure!(plugin.contains(&format!(" {version}")), "{plugin}");
        let chain = cluster.machine().etc("cni/net.d/02-inpod.conflist")?;
        let chain = fs::read_to_string(chain)?;
        ensure!(
            chain.contains(&format!(r#""logLevel":"{level}""#)),
            "{chain}"
        );
        anyhow::Ok(())
    })
    .unwrap();
}

fn start(cluster: &ExclusiveCluster<'_>, name: &str) {
    create(cluster, "upgrade", name, &json!({}), &container(&json!({})));
}

fn joins(cluster: &ExclusiveCluster<'_>, name: &str) {
    let pod = ready(cluster, "upgrade", name);
    cluster.until_enrolled(&pod);
    serves_through_ztunnel(cluster, &pod);
}

/// A connection that is never closed.
struct Held(TcpStream);

impl Held {
    fn open(cluster: &ExclusiveCluster<'_>, to: SocketAddr) -> Self {
        let stream = connect(&cluster.outside, to).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        Self(stream)
    }

    fn goes_on(&mut self) {
        let mut answer = [0; 5];
        self.0.write_all(b"still").unwrap();
        self.0.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"still");
    }
}

/// The way of one release, with the pods that have to stay in the mesh.
struct Way<'a> {
    cluster: &'a ExclusiveCluster<'a>,
    pod: Value,
    held: Held,
}

impl<'a> Way<'a> {
    fn begin(cluster: &'a ExclusiveCluster<'a>) -> Self {
        for name in SHIPPED {
            cluster.machine().load(&Image::Previous(name)).unwrap();
        }
        cluster.uninstall();
        cluster.make_system();
        let chart = previous("chart").unwrap().display().to_string();
        let install = ["install", "inpod", &chart];
        cluster.helm_with(&install, &SET).unwrap();
        runs(cluster, PREVIOUS_VERSION, "debug");
        cluster
            .make_namespace("upgrade", &json!({"istio.io/dataplane-mode": "ambient"}))
            .unwrap();
        let pod = deploy(cluster, "upgrade", "web", &container(&json!({})));
        let command = json!({"command": ["/bin/sh", "-c", ECHO]});
        let echo = deploy(cluster, "upgrade", "echo", &container(&command));
        cluster.until_enrolled(&pod);
        cluster.until_enrolled(&echo);
        let held = Held::open(cluster, address(&echo));
        Self { cluster, pod, held }
    }

    fn helm(&self, flags: &[&str], values: &[&str]) -> anyhow::Result<String> {
        let upgrade = ["upgrade", "inpod", CHART];
        self.cluster
            .helm_with(&[&upgrade[..], flags].concat(), values)
    }

    /// helm gives the old defaults to the new templates.
    fn refuses_old_defaults(&self) {
        let old = self.cluster.agent();
        let refused = self.helm(&["--reuse-values"], &[]).unwrap_err().to_string();
        assert!(refused.contains("--reset-then-reuse-values"), "{refused}");
        assert_eq!(uid(&self.cluster.agent()), uid(&old));
    }

    /// First, the old agent runs with the new objects, as on every node that is not updated yet.
    fn upgrades(&mut self) {
        let (cluster, old) = (self.cluster, self.cluster.agent());
        self.helm(&KEEP, &["updateStrategy.type=OnDelete"]).unwrap();
        start(cluster, "beside");
        joins(cluster, "beside");
        assert_eq!(uid(&cluster.agent()), uid(&old));
        self.held.goes_on();
        let (namespace, name) = named(&old);
        let path = format!("/api/v1/namespaces/{namespace}/pods/{name}");
        cluster.server.delete(&path).unwrap();
        self.is_replaced(&old, "during", (VERSION, "debug"));
        let agent = cluster.agent().to_string();
        let kept = r#"{"name":"INPOD_DRAIN_GRACE_SECONDS","value":"7"}"#;
        assert!(agent.contains(kept), "{agent}");
    }

    fn rolls_back(&mut self, agent: &Value, revision: &str, runs: (&str, &str), name: &str) {
        let back = ["rollback", "inpod", revision, "--namespace", SYSTEM];
        self.cluster.helm(&back).unwrap();
        self.is_replaced(agent, name, runs);
    }

    fn takes_new_values(&mut self) {
        let old = self.cluster.agent();
        self.helm(&["--reset-values"], &["topology=split", peer()])
            .unwrap();
        self.is_replaced(&old, "split", (VERSION, "info"));
    }

    /// The API server refuses one object.
    fn survives_half_an_upgrade(&self) {
        let agent = self.cluster.agent();
        let refused = self.helm(&KEEP, &["podLabels.pool=no/label"]);
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("no/label"), "{refused}");
        assert_eq!(uid(&self.cluster.agent()), uid(&agent));
    }

    /// helm takes the upgrade for done, because the DaemonSet may lack one pod.
    fn survives_absent_images(&mut self) {
        self.helm(&KEEP, &["tag=absent"]).unwrap();
        self.held.goes_on();
        serves_through_ztunnel(self.cluster, &self.pod);
    }

    /// A pod that starts meanwhile waits for the agent instead of starting unenrolled.
    fn is_replaced(&mut self, before: &Value, name: &str, (version, level): (&str, &str)) {
        start(self.cluster, name);
        self.cluster.until_replaced(before);
        runs(self.cluster, version, level);
        joins(self.cluster, name);
        self.cluster.until_enrolled(&self.pod);
        self.held.goes_on();
    }
}

#[test]
fn helm_upgrades_the_previous_release_and_rolls_it_back() {
    on_the_node(|cluster| {
        let mut way = Way::begin(cluster);
        let traffic = traffic(cluster, &way.pod);
        way.refuses_old_defaults();
        way.upgrades();
        let agent = cluster.agent();
        way.rolls_back(&agent, "1", (PREVIOUS_VERSION, "debug"), "back");
        way.takes_new_values();
        let agent = cluster.agent();
        way.survives_half_an_upgrade();
        way.survives_absent_images();
        way.rolls_back(&agent, "4", (VERSION, "info"), "again");
        drop(way);

        cluster.uninstall();
        chain_is_the_primarys(cluster);
        assert_eq!(trace::of_the_node(cluster), *cluster.clean());
        assert_eq!(trace::annotated(cluster), []);
        assert_unbroken(traffic);
        cluster.install();
        cluster.until_whole();
        cluster.remove("upgrade");
    });
}
