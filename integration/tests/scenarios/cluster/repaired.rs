//! Pods with a sidecar that started without the plugin, and the deployed `repair`.

use std::{
    io::Write as _,
    path::Path,
    process::{Child, Command, Stdio},
};

use anyhow::{Context as _, ensure};
use integration::{
    TIMEOUT, eventually,
    kubernetes::{Image, LONG, get, text},
};
use serde_json::{Value, json};

use crate::cluster::{
    agent::{ExclusiveCluster, SYSTEM, named, on_the_node, uid},
    apps::{address, make_deployment, make_pod, ready},
    sidecar::{
        IMAGES, Kind, RESTRICTED, assert_unprivileged, injected, load, serves_through_proxy,
        until_redirected,
    },
};

pub(crate) const REPAIR: &str = "app.kubernetes.io/name=inpod-repair";

const LABEL: &str = "/metadata/labels/cni.istio.io~1uninitialized";

/// 10 s from one repair action to the next, harsher one; the chart's default is 30. Namespace `left` is excluded.
const VALUES: [&str; 3] = [
    "repair.enabled=true",
    "repair.settings.repair_wait_seconds=10",
    "excludeNamespaces={kube-system,left}",
];

/// Recognises peers if containers see the node's own cgroup names (`splitPeer`, deploy/docs/install.md).
pub(crate) fn peer() -> &'static str {
    if Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        "splitPeer=cgroup:/.."
    } else {
        "splitPeer=cgroup:/kubepods"
    }
}

/// Returns the values of a release with `repair`, and additional ones.
fn values(more: &[&'static str]) -> Vec<&'static str> {
    [&VALUES[..], &[peer()], more].concat()
}

/// Returns the end of the validation's last run.
pub(crate) fn last_end(pod: &Value) -> Option<&Value> {
    let all = pod.pointer("/status/initContainerStatuses")?.as_array()?;
    let mut all = all.iter();
    let found = all.find(|it| text(it, "/name") == "istio-validation")?;
    found.pointer("/lastState/terminated")
}

/// Waits until the validation has failed and the kubelet backs off.
fn until_failed(cluster: &ExclusiveCluster<'_>, namespace: &str, app: &str) -> Value {
    let pod = eventually("its validation has failed", LONG, || {
        let pods = cluster.pods(namespace, &format!("app={app}"))?;
        let pod = pods.first().context("no pod")?.clone();
        last_end(&pod).with_context(|| format!("not yet: {pod}"))?;
        anyhow::Ok(pod)
    })
    .unwrap();
    let end = last_end(&pod).unwrap();
    assert_eq!(end.get("exitCode"), Some(&json!(126)), "{end}");
    let message = text(end, "/message");
    for words in ["this pod is not redirected", "IPv4: ", "IPv6: ", "uid 1337"] {
        assert!(message.contains(words), "{words}: {message}");
    }
    assert!(get(&cluster.outside, address(&pod)).is_err(), "it serves");
    assert_eq!(cluster.in_netns(&pod, &["nft", "list", "tables"]), "");
    pod
}

/// Waits for an Event of `repair` about a pod, and returns its text.
pub(crate) fn event(
    cluster: &ExclusiveCluster<'_>,
    pod: &Value,
    reason: &str,
    kind: &str,
) -> String {
    let (namespace, name) = named(pod);
    let path = format!("/apis/events.k8s.io/v1/namespaces/{namespace}/events");
    eventually("the Event is there", LONG, || {
        let all = cluster.server.get(&path)?;
        let all = all.pointer("/items").and_then(Value::as_array);
        let is_it = |event: &&Value| {
            text(event, "/regarding/name") == name
                && text(event, "/reason") == reason
                && text(event, "/type") == kind
                && text(event, "/reportingController") == "inpod.io/repair"
        };
        let found = all.into_iter().flatten().find(is_it);
        let found = found.with_context(|| format!("no {kind} {reason} of {name}"))?;
        anyhow::Ok(text(found, "/note").to_owned())
    })
    .unwrap()
}

/// Counts pods for which an action had a result since `repair` started.
fn counted(cluster: &ExclusiveCluster<'_>, way: &str, result: &str) -> anyhow::Result<u64> {
    let socket = "/run/inpod/repair/grpc.sock";
    let url = "http://localhost/metrics";
    let metrics = cluster
        .machine()
        .exec(&["curl", "-sSf", "--unix-socket", socket, url])?;
    let series = format!("inpod_repair_pods_total{{type=\"{way}\",result=\"{result}\"}} ");
    let mut lines = metrics.lines();
    let number = lines.find_map(|line| line.strip_prefix(&series));
    Ok(number.with_context(|| metrics.clone())?.parse()?)
}

/// A table with netconfig's name, which the kernel reserves for the process that made it (`NFT_TABLE_F_OWNER` of
/// linux/netfilter/nf_tables.h): nothing can be written until that ends.
struct Owner(Child);

impl Owner {
    fn of(cluster: &ExclusiveCluster<'_>, pod: &Value) -> Self {
        let netns = cluster.machine().netns_of(uid(pod)).unwrap();
        let mut child = Command::new("nsenter")
            .arg(format!("--net={}", netns.path().display()))
            .args(["nft", "-i"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        writeln!(stdin, "add table inet inpod-nat {{ flags owner; }}").unwrap();
        child.stdin = Some(stdin);
        let owner = Self(child);
        eventually("the table is there", TIMEOUT, || {
            let tables = cluster.in_netns(pod, &["nft", "list", "ruleset"]);
            ensure!(tables.contains("flags owner"), "{tables}");
            anyhow::Ok(())
        })
        .unwrap();
        owner
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // It has ended already, or ends now.
        self.0.kill().unwrap_or_default();
        self.0.wait().map(drop).unwrap_or_default();
    }
}

struct Broken {
    plain: Value,
    native: Value,
    /// Nothing can be written here for now.
    stuck: Value,
    /// A pod of the excluded namespace.
    left: Value,
    owner: Owner,
}

impl Broken {
    fn make(cluster: &ExclusiveCluster<'_>) -> Self {
        let (key, value) = RESTRICTED;
        for namespace in ["late", "left"] {
            cluster
                .make_namespace(namespace, &json!({ key: value }))
                .unwrap();
        }
        for (app, kind) in [
            ("plain", Kind::Plain),
            ("native", Kind::Native),
            ("stuck", Kind::Plain),
        ] {
            make_deployment(cluster, "late", app, &injected(app, kind));
        }
        make_pod(cluster, "left", "alone", &injected("alone", Kind::Plain)).unwrap();
        let [plain, native, stuck] =
            ["plain", "native", "stuck"].map(|app| until_failed(cluster, "late", app));
        let left = until_failed(cluster, "left", "alone");
        let owner = Owner::of(cluster, &stuck);
        Self {
            plain,
            native,
            stuck,
            left,
            owner,
        }
    }

    fn all(&self) -> [&Value; 4] {
        [&self.plain, &self.native, &self.stuck, &self.left]
    }

    /// `repair` alone changes nothing and reports the missing service.
    fn are_left_without_pod_events(&self, cluster: &ExclusiveCluster<'_>) {
        for pod in self.all() {
            let note = event(cluster, pod, "RepairBrokenPod", "Warning");
            assert!(note.contains("pod-events is not available"), "{note}");
            is_as_it_was(cluster, pod);
        }
    }

    /// The agent applies the rules in running pods, the kubelet restarts the validation, and they serve.
    fn are_repaired_in_place(&self, cluster: &ExclusiveCluster<'_>) {
        for (app, before) in [("plain", &self.plain), ("native", &self.native)] {
            let now = ready(cluster, "late", app);
            assert_eq!(uid(&now), uid(before));
            until_redirected(cluster, &now, "");
            assert_unprivileged(cluster, &now);
            serves_through_proxy(cluster, &now);
            let note = event(cluster, before, "RepairBrokenPod", "Normal");
            assert!(note.contains("redirected now"), "{note}");
        }
        assert_eq!(counted(cluster, "repair", "success").unwrap(), 2);
        for pod in self.all() {
            is_as_it_was(cluster, pod);
        }
    }

    /// Expects the label on pods that could not or must not be redirected, and on no others.
    fn are_labelled(&self, cluster: &ExclusiveCluster<'_>) {
        for (pod, why) in [
            (&self.stuck, "could not redirect it"),
            (&self.left, "NAMESPACE_EXCLUDED"),
        ] {
            let note = event(cluster, pod, "LabelBrokenPod", "Warning");
            assert!(note.contains(why), "{note}");
            let (namespace, name) = named(pod);
            let now = cluster.pod(namespace, name).unwrap();
            assert_eq!(text(&now, LABEL), "true", "{now}");
            assert_eq!(uid(&now), uid(pod));
        }
        is_as_it_was(cluster, &self.plain);
        is_as_it_was(cluster, &self.native);
    }

    /// The pod that could not be redirected is deleted and its successor serves; the one without a controller stays.
    fn are_deleted_where_that_helps(&self, cluster: &ExclusiveCluster<'_>) {
        let note = event(cluster, &self.stuck, "DeleteBrokenPod", "Warning");
        assert!(note.contains("could not redirect it"), "{note}");
        let successor = ready(cluster, "late", "stuck");
        assert_ne!(uid(&successor), uid(&self.stuck));
        until_redirected(cluster, &successor, "podnet");
        serves_through_proxy(cluster, &successor);
        assert_eq!(counted(cluster, "delete", "success").unwrap(), 1);
        let left = cluster.pod("left", "alone").unwrap();
        assert_eq!(uid(&left), uid(&self.left));
        assert_eq!(left.pointer("/metadata/deletionTimestamp"), None);
        is_as_it_was(cluster, &self.plain);
        is_as_it_was(cluster, &self.native);
    }
}

/// Expects that a pod is neither deleted nor labelled.
fn is_as_it_was(cluster: &ExclusiveCluster<'_>, pod: &Value) {
    let (namespace, name) = named(pod);
    let now = cluster.pod(namespace, name).unwrap();
    assert_eq!(uid(&now), uid(pod));
    assert_eq!(now.pointer("/metadata/deletionTimestamp"), None);
    assert_eq!(now.pointer(LABEL), None, "{now}");
}

#[test]
fn pods_that_started_without_the_plugin_are_repaired_in_place_labelled_or_deleted_as_configured() {
    on_the_node(|cluster| {
        load(cluster, &IMAGES);
        load(cluster, &[Image::Shipped("repair")]);
        cluster.uninstall();
        let pods = Broken::make(cluster);
        cluster.install_without_images(&values(&[]));
        cluster.until_ready(SYSTEM, REPAIR, 1).unwrap();
        pods.are_left_without_pod_events(cluster);
        cluster.upgrade(&values(&[]));
        cluster.until_whole();
        pods.are_repaired_in_place(cluster);
        cluster.upgrade(&values(&["repair.labelPods=true"]));
        pods.are_labelled(cluster);
        let both = values(&["repair.labelPods=true", "repair.deletePods=true"]);
        cluster.upgrade(&both);
        pods.are_deleted_where_that_helps(cluster);
        drop(pods.owner);
        for namespace in ["late", "left"] {
            cluster.remove(namespace);
        }
        let before = cluster.agent();
        cluster.upgrade(&[]);
        cluster.until_replaced(&before);
        cluster.until_whole();
    });
}
