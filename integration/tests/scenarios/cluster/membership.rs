//! The pod condition `inpod.io/InMesh` as a readiness gate: a Service sends connections only to pods that are proven to
//! be in the mesh.

use std::{
    fmt, mem,
    process::{Child, Command},
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use integration::{
    eventually,
    kubernetes::{LONG, Traffic, is, text},
};
use serde_json::{Value, json};

use crate::cluster::{
    agent::{ExclusiveCluster, on_the_node, uid},
    apps::{address, container, create, deploy, ready},
    mesh::taken,
};

const NAMESPACE: &str = "member";

const IN_MESH: &str = "inpod.io/InMesh";

/// The arguments of the ztunnel in `manifests/ztunnel.yaml`.
const ZTUNNEL: [&str; 2] = [
    "--access-log=/var/log/ztunnel/access.json",
    "--status=/var/log/ztunnel/state.json",
];

/// A time in which ztunnel refuses a pod again.
const SOME_TIME: Duration = Duration::from_secs(5);

/// A time in which a healthy pod causes no request.
const QUIET_TIME: Duration = Duration::from_secs(60);

/// A time in which the agent repairs contested rules several times: at once, and after about 10 s and 20 s more.
const CONTEST_TIME: Duration = Duration::from_secs(40);

/// The state of a pod that Kubernetes shows.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Shown {
    /// The status and the reason of the condition.
    condition: String,
    is_ready: bool,
    is_endpoint: bool,
}

impl Shown {
    fn read(cluster: &ExclusiveCluster<'_>, name: &str) -> anyhow::Result<Self> {
        let pod = cluster.pod(NAMESPACE, name)?;
        let conditions = pod.pointer("/status/conditions").and_then(Value::as_array);
        let mut conditions = conditions.into_iter().flatten();
        let condition = conditions.find(|it| text(it, "/type") == IN_MESH);
        Ok(Self {
            condition: condition.map(describe).unwrap_or_default(),
            is_ready: is(&pod, "Ready"),
            is_endpoint: is_endpoint(cluster, text(&pod, "/status/podIP"))?,
        })
    }

    /// Returns whether the condition, `Ready` and the endpoint show a pod in the mesh.
    fn is_member(&self) -> bool {
        self.condition == "True LabelOnNamespace" && self.is_ready && self.is_endpoint
    }

    /// Returns whether the condition keeps the pod out of its Service.
    fn is_out(&self) -> bool {
        self.condition.starts_with("False ") && !self.is_ready && !self.is_endpoint
    }

    fn is_excluded(&self, reason: &str) -> bool {
        self.is_out() && self.condition.ends_with(&format!(" {reason}"))
    }
}

fn describe(condition: &Value) -> String {
    let (status, reason) = (text(condition, "/status"), text(condition, "/reason"));
    format!("{status} {reason}")
}

/// Returns whether an address is a ready endpoint of any Service in the namespace.
fn is_endpoint(cluster: &ExclusiveCluster<'_>, ip: &str) -> anyhow::Result<bool> {
    let path = format!("/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices");
    let slices = cluster.server.get(&path)?;
    let slices = slices.pointer("/items").and_then(Value::as_array);
    let endpoints = slices.context("no list")?.iter().filter_map(|slice| {
        let endpoints = slice.pointer("/endpoints")?;
        endpoints.as_array()
    });
    let mut endpoints = endpoints.flatten();
    let is_it = |endpoint: &Value| {
        endpoint.pointer("/addresses/0") == Some(&json!(ip))
            && endpoint.pointer("/conditions/ready") == Some(&json!(true))
    };
    Ok(endpoints.any(is_it))
}

/// The new connections to a pod while Kubernetes showed one state.
struct Row {
    since: Duration,
    shown: Shown,
    /// Connections that ztunnel accepted.
    through_ztunnel: usize,
    /// Answered connections that ztunnel did not accept.
    plaintext: usize,
    failed: usize,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let since = self.since.as_secs_f64();
        let (condition, yes) = (
            &self.shown.condition,
            |value| if value { "yes" } else { "no" },
        );
        let (is_ready, is_endpoint) = (yes(self.shown.is_ready), yes(self.shown.is_endpoint));
        let (through, plaintext, failed) = (self.through_ztunnel, self.plaintext, self.failed);
        write!(
            f,
            "{since:>6.1} s  {condition:<22}  Ready {is_ready:<3}  endpoint {is_endpoint:<3}  \
             {through:>4} through ztunnel  {plaintext:>4} plaintext  {failed:>4} refused"
        )
    }
}

/// A pod of a Service, with a client outside the mesh that opens connections without a pause.
struct Watch<'a> {
    cluster: &'a ExclusiveCluster<'a>,
    pod: Value,
    client: Value,
    began: Instant,
    /// The state since a time after the begin.
    shown: (Duration, Shown),
    traffic: Option<Traffic>,
    accepted: usize,
    rows: Vec<Row>,
}

impl<'a> Watch<'a> {
    fn start(cluster: &'a ExclusiveCluster<'a>, pod: Value, client: Value) -> Self {
        let mut watch = Self {
            shown: (
                Duration::ZERO,
                Shown::read(cluster, text(&pod, "/metadata/name")).unwrap(),
            ),
            cluster,
            pod,
            client,
            began: Instant::now(),
            traffic: None,
            accepted: 0,
            rows: Vec::new(),
        };
        watch.open_connections();
        watch
    }

    fn open_connections(&mut self) {
        self.accepted = taken(self.cluster, &self.pod, 15006);
        let client = self.cluster.machine().netns_of(uid(&self.client)).unwrap();
        self.traffic = Some(Traffic::start(client, address(&self.pod)));
    }

    /// Completes and prints the row of the current state.
    fn complete_row(&mut self) {
        let report = self.traffic.take().unwrap().end().unwrap();
        let through_ztunnel = taken(self.cluster, &self.pod, 15006) - self.accepted;
        let (since, shown) = self.shown.clone();
        let row = Row {
            since,
            shown,
            through_ztunnel,
            plaintext: report.answered.saturating_sub(through_ztunnel),
            failed: report.failed.len(),
        };
        println!("{row}");
        self.rows.push(row);
        self.open_connections();
    }

    /// Starts a step, whose rows begin with the current state. Returns the rows of the step before.
    fn begin(&mut self, step: &str) -> Vec<Row> {
        self.complete_row();
        println!("-- {step}");
        (self.began, self.shown.0) = (Instant::now(), Duration::ZERO);
        mem::take(&mut self.rows)
    }

    fn observe(&mut self) -> anyhow::Result<&Shown> {
        let now = Shown::read(self.cluster, text(&self.pod, "/metadata/name"))?;
        if now != self.shown.1 {
            // The last connection of the row may take seconds to fail.
            let since = self.began.elapsed();
            self.complete_row();
            self.shown = (since, now);
        }
        Ok(&self.shown.1)
    }

    fn until(&mut self, what: &str, is_reached: impl Fn(&Shown) -> bool) {
        eventually(what, LONG, || {
            let shown = self.observe()?;
            ensure!(is_reached(shown), "{shown:?}");
            anyhow::Ok(())
        })
        .unwrap();
    }

    fn stays(&mut self, time: Duration, is_expected: impl Fn(&Shown) -> bool) {
        let began = Instant::now();
        while began.elapsed() < time {
            let shown = self.observe().unwrap();
            assert!(is_expected(shown), "{shown:?}");
        }
    }

    fn until_member(&mut self) {
        self.until("the pod is in the mesh and an endpoint", Shown::is_member);
    }

    fn until_excluded(&mut self, reason: &str) {
        self.until(reason, |shown| shown.is_excluded(reason));
    }

    /// Returns the conditions that pod-events wrote, in order.
    fn patches(&self) -> Vec<String> {
        let changes = self.cluster.server.changes_in(NAMESPACE).unwrap();
        let of_pod = changes.iter().filter(|change| {
            text(change, "/objectRef/resource") == "pods"
                && text(change, "/objectRef/name") == text(&self.pod, "/metadata/name")
        });
        let condition = |change: &Value| {
            let condition = change.pointer("/requestObject/status/conditions/0");
            condition.map_or_else(|| change.to_string(), describe)
        };
        of_pod.map(condition).collect()
    }
}

/// Expects that new connections were refused while the pod had a condition, and that none bypassed ztunnel.
fn assert_refused(rows: &[Row], condition: &str) {
    let of_condition = rows.iter().filter(|row| row.shown.condition == condition);
    assert!(of_condition.map(|row| row.failed).sum::<usize>() > 0);
    assert_no_plaintext(rows);
}

fn assert_no_plaintext(rows: &[Row]) {
    assert_eq!(rows.iter().map(|row| row.plaintext).sum::<usize>(), 0);
}

/// Changes the template of the reference ztunnel's DaemonSet.
fn change_ztunnel(cluster: &ExclusiveCluster<'_>, spec: &Value) {
    let change = json!({"spec": {"template": {"spec": spec}}}).to_string();
    let patch = [
        "patch",
        "daemonset",
        "ztunnel",
        "--namespace",
        "istio-system",
    ];
    // kubectl's strategic merge patch keeps the other fields of the container.
    let patch = [&patch[..], &["--patch", &change]].concat();
    cluster.kubectl(&patch).unwrap();
}

fn run_ztunnel_with(cluster: &ExclusiveCluster<'_>, more: &[&str]) {
    let args = [&ZTUNNEL[..], more].concat();
    let container = json!({"name": "istio-proxy", "args": args});
    change_ztunnel(cluster, &json!({"containers": [container]}));
}

fn stop_ztunnel(cluster: &ExclusiveCluster<'_>) {
    change_ztunnel(
        cluster,
        &json!({"nodeSelector": {"inpod.test/absent": "yes"}}),
    );
}

fn start_ztunnel(cluster: &ExclusiveCluster<'_>) {
    change_ztunnel(
        cluster,
        &json!({"nodeSelector": {"inpod.test/absent": null}}),
    );
}

/// Runs a script in the container of a pod.
fn execute(cluster: &ExclusiveCluster<'_>, pod: &Value, script: &str) {
    let name = text(pod, "/metadata/name");
    let exec = [
        "exec",
        "--namespace",
        NAMESPACE,
        name,
        "--",
        "/bin/sh",
        "-c",
        script,
    ];
    cluster.kubectl(&exec).unwrap();
}

/// A process that keeps removing every rule from the netns of a pod, until dropped.
struct Flusher(Child);

impl Flusher {
    fn start(cluster: &ExclusiveCluster<'_>, pod: &Value) -> Self {
        let netns = cluster.machine().netns_of(uid(pod)).unwrap();
        let net = format!("--net={}", netns.path().display());
        let flush = "while :; do nft flush ruleset; sleep 0.05; done";
        let mut command = Command::new("nsenter");
        Self(command.args([&net, "sh", "-c", flush]).spawn().unwrap())
    }
}

impl Drop for Flusher {
    fn drop(&mut self) {
        // The process may have ended already.
        self.0.kill().unwrap_or_default();
        self.0.wait().map(drop).unwrap_or_default();
    }
}

fn is_refused_by_ztunnel(watch: &mut Watch<'_>) {
    watch.begin("ztunnel is replaced by one that refuses pods");
    run_ztunnel_with(watch.cluster, &["--fault", "nack-adds"]);
    watch.until_excluded("ZtunnelRefused");
    watch.stays(SOME_TIME, |shown| shown.is_excluded("ZtunnelRefused"));
    let rows = watch.begin("a working ztunnel replaces it");
    assert_refused(&rows, "False ZtunnelRefused");
    run_ztunnel_with(watch.cluster, &[]);
    watch.until_member();
}

fn loses_a_port(watch: &mut Watch<'_>) {
    assert_no_plaintext(&watch.begin("ztunnel ends"));
    stop_ztunnel(watch.cluster);
    watch.until_excluded("ZtunnelLost");
    let rows = watch.begin("a process of the pod listens on 15008, and ztunnel starts");
    assert_refused(&rows, "True LabelOnNamespace");
    let listen = "/bin/httpd -f -p 15008 >/dev/null 2>&1 & echo $! >/tmp/taker";
    execute(watch.cluster, &watch.pod, listen);
    start_ztunnel(watch.cluster);
    watch.until_excluded("ZtunnelRefused");
    watch.stays(SOME_TIME, |shown| shown.is_excluded("ZtunnelRefused"));
    let rows = watch.begin("the process ends");
    assert_refused(&rows, "False ZtunnelRefused");
    execute(watch.cluster, &watch.pod, "kill $(/bin/cat /tmp/taker)");
    watch.until_member();
}

/// Returns the patches until the end of the removals.
fn loses_its_rules(watch: &mut Watch<'_>) -> Vec<String> {
    assert_no_plaintext(&watch.begin("something removes the pod's rules every 50 ms"));
    let flusher = Flusher::start(watch.cluster, &watch.pod);
    watch.until_excluded("RulesContested");
    // A repair may fail meanwhile, with a reason of its own.
    watch.stays(CONTEST_TIME, Shown::is_out);
    let patches = watch.patches();
    let rows = watch.begin("the removals end");
    assert!(rows.iter().any(|row| row.plaintext > 0), "the rules stayed");
    drop(flusher);
    watch.until_member();
    assert_eq!(watch.patches().len(), patches.len() + 1);
    patches
}

fn keeps_its_condition(watch: &mut Watch<'_>) {
    watch.begin("the pod's rules are removed once");
    let before = watch.patches();
    watch
        .cluster
        .in_netns(&watch.pod, &["nft", "flush", "ruleset"]);
    watch.stays(QUIET_TIME, Shown::is_member);
    watch.cluster.until_enrolled(&watch.pod);
    watch.complete_row();
    assert_eq!(watch.patches(), before);
}

#[test]
fn in_mesh_condition_gates_endpoints_through_each_fault() {
    on_the_node(|cluster| {
        let mesh = json!({"istio.io/dataplane-mode": "ambient"});
        cluster.make_namespace(NAMESPACE, &mesh).unwrap();
        cluster.make_namespace("callers", &json!({})).unwrap();
        let service = json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": {"name": "web", "namespace": NAMESPACE},
            "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8080}]},
        });
        let path = format!("/api/v1/namespaces/{NAMESPACE}/services");
        cluster.server.create(&path, &service).unwrap();
        let gate = json!({"readinessGates": [{"conditionType": IN_MESH}]});
        create(cluster, NAMESPACE, "web", &gate, &container(&json!({})));
        let client = deploy(cluster, "callers", "client", &container(&json!({})));
        let pod = ready(cluster, NAMESPACE, "web");
        cluster.until_enrolled(&pod);
        let mut watch = Watch::start(cluster, pod, client);
        watch.until_member();
        keeps_its_condition(&mut watch);
        is_refused_by_ztunnel(&mut watch);
        loses_a_port(&mut watch);
        let patches = loses_its_rules(&mut watch);
        watch.complete_row();
        println!("patches: {:?}", watch.patches());
        let (member, refused) = ("True LabelOnNamespace", "False ZtunnelRefused");
        let expected = [
            member,
            refused,
            member,
            "False ZtunnelLost",
            refused,
            member,
        ];
        let (before, contested) = patches.split_at(expected.len());
        assert_eq!(before, expected);
        // The first repairs are made at once; one that fails and the next that succeeds both show.
        let mut delayed = contested
            .iter()
            .skip_while(|patch| *patch != "False RulesContested");
        assert!(delayed.all(|patch| patch.starts_with("False ")));
        assert!(contested.windows(2).all(|two| two.first() != two.last()));
        drop(watch);
        cluster.remove(NAMESPACE);
        cluster.remove("callers");
    });
}
