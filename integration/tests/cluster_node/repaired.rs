//! Pods with a sidecar that started while the plugin was not there, and what `repair` does with them, as the chart deploys it.

use std::{
    io::Write as _,
    path::Path,
    process::{Child, Command, Stdio},
};

use anyhow::{Context as _, ensure};
use integration::{
    PATIENCE, eventually,
    kubernetes::{Image, LONG, VERSION, get, text},
};
use serde_json::{Value, json};

use crate::{
    agent::{SYSTEM, Turn, named, on_the_node, uid},
    apps::{address, make_deployment, make_pod, ready},
    sidecar::{
        IMAGES, Kind, RESTRICTED, has_no_right, injected, load, serves_through_proxy,
        until_redirected,
    },
};

const REPAIR: &str = "app.kubernetes.io/name=inpod-repair";

const LABEL: &str = "/metadata/labels/cni.istio.io~1uninitialized";

/// How long each kinder way is given: 10 s, where the chart has 30. One namespace is nobody's.
const VALUES: [&str; 3] = [
    "repair.enabled=true",
    "repair.settings.repair_wait_seconds=10",
    "excludeNamespaces={kube-system,left}",
];

/// Where containers see the node's own names of cgroups, peers are told by these (`splitPeer`, deploy/docs/install.md).
fn peer() -> &'static str {
    if Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        "splitPeer=cgroup:/.."
    } else {
        "splitPeer=cgroup:/kubepods"
    }
}

/// The values of a release with `repair`, and more.
fn values(more: &[&'static str]) -> Vec<&'static str> {
    [&VALUES[..], &[peer()], more].concat()
}

/// What the last run of the validation ended with.
fn last_end(pod: &Value) -> Option<&Value> {
    let all = pod.pointer("/status/initContainerStatuses")?.as_array()?;
    let mut all = all.iter();
    let found = all.find(|it| text(it, "/name") == "istio-validation")?;
    found.pointer("/lastState/terminated")
}

/// Waits until the kubelet waits before it runs the validation of an application again, which has said what is missing.
fn until_failed(turn: &Turn<'_>, namespace: &str, app: &str) -> Value {
    let pod = eventually("its validation has failed", LONG, || {
        let pods = turn.pods(namespace, &format!("app={app}"))?;
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
    assert!(get(&turn.outside, address(&pod)).is_err(), "it serves");
    assert_eq!(turn.in_netns(&pod, &["nft", "list", "tables"]), "");
    pod
}

/// Waits for an Event of `repair` about a pod; what it says.
fn event(turn: &Turn<'_>, pod: &Value, reason: &str, kind: &str) -> String {
    let (namespace, name) = named(pod);
    let path = format!("/apis/events.k8s.io/v1/namespaces/{namespace}/events");
    eventually("the Event is there", LONG, || {
        let all = turn.server.get(&path)?;
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

/// How many pods a way of `repair` came to a result with, since it started.
fn counted(turn: &Turn<'_>, way: &str, result: &str) -> anyhow::Result<u64> {
    let socket = "/run/inpod/repair/grpc.sock";
    let url = "http://localhost/metrics";
    let metrics = turn
        .machine
        .exec(&["curl", "-sSf", "--unix-socket", socket, url])?;
    let series = format!("inpod_repair_pods_total{{type=\"{way}\",result=\"{result}\"}} ");
    let mut lines = metrics.lines();
    let number = lines.find_map(|line| line.strip_prefix(&series));
    Ok(number.with_context(|| metrics.clone())?.parse()?)
}

/// A table of netconfig's name in a pod, which the kernel keeps for whoever made it (`NFT_TABLE_F_OWNER` of
/// linux/netfilter/nf_tables.h): nothing can be written until its owner ends.
struct Owner(Child);

impl Owner {
    fn of(turn: &Turn<'_>, pod: &Value) -> Self {
        let netns = turn.machine.netns_of(uid(pod)).unwrap();
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
        eventually("the table is there", PATIENCE, || {
            let tables = turn.in_netns(pod, &["nft", "list", "ruleset"]);
            ensure!(tables.contains("flags owner"), "{tables}");
            anyhow::Ok(())
        })
        .unwrap();
        owner
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // Ended already, or ends now.
        self.0.kill().unwrap_or_default();
        self.0.wait().map(drop).unwrap_or_default();
    }
}

/// Pods that started without the plugin and failed.
struct Broken {
    plain: Value,
    native: Value,
    /// In which nothing can be written for now.
    stuck: Value,
    /// Of the namespace that is nobody's.
    left: Value,
    owner: Owner,
}

impl Broken {
    fn make(turn: &Turn<'_>) -> Self {
        let (key, value) = RESTRICTED;
        for namespace in ["late", "left"] {
            turn.make_namespace(namespace, &json!({ key: value }))
                .unwrap();
        }
        for (app, kind) in [
            ("plain", Kind::Plain),
            ("native", Kind::Native),
            ("stuck", Kind::Plain),
        ] {
            make_deployment(turn, "late", app, &injected(app, kind));
        }
        make_pod(turn, "left", "alone", &injected("alone", Kind::Plain)).unwrap();
        let [plain, native, stuck] =
            ["plain", "native", "stuck"].map(|app| until_failed(turn, "late", app));
        let left = until_failed(turn, "left", "alone");
        let owner = Owner::of(turn, &stuck);
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

    /// `repair` alone changes nothing, and says whom it misses.
    fn are_left_while_nobody_knows(&self, turn: &Turn<'_>) {
        for pod in self.all() {
            let note = event(turn, pod, "RepairBrokenPod", "Warning");
            assert!(note.contains("pod-events is not available"), "{note}");
            is_as_it_was(turn, pod);
        }
    }

    /// The agent puts the rules into the running pods, the kubelet starts the validation again, and they serve.
    fn are_repaired_in_place(&self, turn: &Turn<'_>) {
        for (app, before) in [("plain", &self.plain), ("native", &self.native)] {
            let now = ready(turn, "late", app);
            assert_eq!(uid(&now), uid(before));
            until_redirected(turn, &now, "");
            has_no_right(turn, &now);
            serves_through_proxy(turn, &now);
            let note = event(turn, before, "RepairBrokenPod", "Normal");
            assert!(note.contains("redirected now"), "{note}");
        }
        assert_eq!(counted(turn, "repair", "success").unwrap(), 2);
        for pod in self.all() {
            is_as_it_was(turn, pod);
        }
    }

    /// Those that could not be redirected, and those that are not to be, bear the label. Others do not.
    fn are_labelled(&self, turn: &Turn<'_>) {
        for (pod, why) in [
            (&self.stuck, "could not redirect it"),
            (&self.left, "NAMESPACE_EXCLUDED"),
        ] {
            let note = event(turn, pod, "LabelBrokenPod", "Warning");
            assert!(note.contains(why), "{note}");
            let (namespace, name) = named(pod);
            let now = turn.pod(namespace, name).unwrap();
            assert_eq!(text(&now, LABEL), "true", "{now}");
            assert_eq!(uid(&now), uid(pod));
        }
        is_as_it_was(turn, &self.plain);
        is_as_it_was(turn, &self.native);
    }

    /// The one that could not be redirected is deleted; its successor, which the plugin saw, serves. The one that no successor
    /// would help stays.
    fn are_deleted_where_that_helps(&self, turn: &Turn<'_>) {
        let note = event(turn, &self.stuck, "DeleteBrokenPod", "Warning");
        assert!(note.contains("could not redirect it"), "{note}");
        let successor = ready(turn, "late", "stuck");
        assert_ne!(uid(&successor), uid(&self.stuck));
        until_redirected(turn, &successor, "podnet");
        serves_through_proxy(turn, &successor);
        assert_eq!(counted(turn, "delete", "success").unwrap(), 1);
        let left = turn.pod("left", "alone").unwrap();
        assert_eq!(uid(&left), uid(&self.left));
        assert_eq!(left.pointer("/metadata/deletionTimestamp"), None);
        is_as_it_was(turn, &self.plain);
        is_as_it_was(turn, &self.native);
    }
}

/// Neither deleted nor labelled.
fn is_as_it_was(turn: &Turn<'_>, pod: &Value) {
    let (namespace, name) = named(pod);
    let now = turn.pod(namespace, name).unwrap();
    assert_eq!(uid(&now), uid(pod));
    assert_eq!(now.pointer("/metadata/deletionTimestamp"), None);
    assert_eq!(now.pointer(LABEL), None, "{now}");
}

#[test]
fn pods_that_started_without_the_plugin_are_mended_in_place_labelled_or_deleted_as_repair_is_told()
{
    on_the_node(|turn| {
        load(turn, &IMAGES);
        let repair = Image::Shipped {
            name: "repair",
            tag: VERSION,
        };
        load(turn, &[repair]);
        turn.uninstall();
        let pods = Broken::make(turn);
        turn.install_all_but_the_agent(&values(&[]));
        turn.until_ready(SYSTEM, REPAIR, 1).unwrap();
        pods.are_left_while_nobody_knows(turn);
        turn.upgrade(&values(&[]));
        turn.until_whole();
        pods.are_repaired_in_place(turn);
        turn.upgrade(&values(&["repair.labelPods=true"]));
        pods.are_labelled(turn);
        let both = values(&["repair.labelPods=true", "repair.deletePods=true"]);
        turn.upgrade(&both);
        pods.are_deleted_where_that_helps(turn);
        drop(pods.owner);
        for namespace in ["late", "left"] {
            turn.remove(namespace);
        }
        let before = turn.agent();
        turn.upgrade_from(&both, &[]);
        turn.until_replaced(&before);
        turn.until_whole();
    });
}
