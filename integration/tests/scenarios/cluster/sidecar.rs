//! Pods as Istio's injector leaves them, in namespaces with the profile "restricted", which admits no privileged
//! container. The proxy is the harness's own: it logs each connection with its destination.

use std::{fs, net::SocketAddr};

use anyhow::ensure;
use integration::{
    TIMEOUT, eventually,
    kubernetes::{Image, VERSION, ask, text},
};
use serde_json::{Value, json};

use crate::cluster::{
    agent::{ExclusiveCluster, explain_on, named, on_the_node, uid},
    apps::{address, container, deploy, make_deployment, make_pod, ready},
    mesh::{serves_through_ztunnel, taken},
};

/// The application returns its client's address here.
pub(crate) const WHO: &str = "/cgi-bin/who";

/// The proxy calls the application from here.
const PROXY: &str = "127.0.0.6";

/// Kubernetes' Pod Security Standard, enforced by the API server itself.
pub(crate) const RESTRICTED: (&str, &str) = ("pod-security.kubernetes.io/enforce", "restricted");

/// The images that pods with a sidecar run.
pub(crate) const IMAGES: [Image; 2] = [Image::Sidecar, Image::Shipped("validate")];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A regular container of the pod.
    Plain,
    /// An init container that keeps running.
    Native,
}

/// Returns the security context that "restricted" demands, with its own user.
fn context(user: u32) -> Value {
    json!({
        "runAsUser": user, "runAsGroup": user, "runAsNonRoot": true,
        "privileged": false, "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]},
    })
}

pub(crate) fn application() -> Value {
    container(&json!({
        "securityContext": context(1000),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }))
}

/// Returns Istio's validation with its own arguments (services/docs/facts/istio-sidecar.md, 6.6).
fn validation() -> Value {
    json!({
        "name": "istio-validation", "image": format!("localhost/validate:{VERSION}"), "imagePullPolicy": "Never",
        "args": [
            "istio-iptables", "-p", "15001", "-z", "15006", "-u", "1337", "-m", "REDIRECT", "-i", "*", "-x", "", "-b", "*",
            "-d", "15090,15021,15020", "--log_output_level=default:info", "--run-validation", "--skip-rule-apply",
        ],
        "securityContext": read_only(context(1337)),
    })
}

/// Returns the proxy, with Istio's own arguments and probes.
fn proxy() -> Value {
    let ready = json!({"path": "/healthz/ready", "port": 15021});
    json!({
        "name": "istio-proxy", "image": "inpod.test/sidecar:1", "imagePullPolicy": "Never",
        "args": ["proxy", "sidecar", "--domain", "default.svc.cluster.local", "--proxyLogLevel=warning"],
        "ports": [{"containerPort": 15090, "protocol": "TCP", "name": "http-envoy-prom"}],
        "startupProbe": {"httpGet": ready, "periodSeconds": 1, "timeoutSeconds": 3, "failureThreshold": 600},
        "readinessProbe": {"httpGet": ready, "periodSeconds": 15, "timeoutSeconds": 3, "failureThreshold": 4},
        "securityContext": read_only(context(1337)),
    })
}

fn with(object: &mut Value, name: &str, value: Value) {
    let all = object.as_object_mut().unwrap();
    all.insert(name.to_owned(), value);
}

fn read_only(mut context: Value) -> Value {
    with(&mut context, "readOnlyRootFilesystem", json!(true));
    context
}

pub(crate) fn template(app: &str, init: &[Value], containers: &[Value]) -> Value {
    json!({
        "metadata": {"labels": {"app": app}, "annotations": {}},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "initContainers": init, "containers": containers,
            "volumes": [{"name": "tmp", "emptyDir": {}}],
        },
    })
}

pub(crate) fn injected(app: &str, kind: Kind) -> Value {
    let mut proxy = proxy();
    let status = match kind {
        Kind::Plain => r#"{"initContainers":["istio-validation"],"containers":["istio-proxy"]}"#,
        Kind::Native => {
            r#"{"initContainers":["istio-validation","istio-proxy"],"containers":null}"#
        }
    };
    let mut template = match kind {
        Kind::Plain => template(app, &[validation()], &[application(), proxy]),
        Kind::Native => {
            with(&mut proxy, "restartPolicy", json!("Always"));
            template(app, &[validation(), proxy], &[application()])
        }
    };
    for (name, value) in [
        ("sidecar.istio.io/status", status),
        ("sidecar.istio.io/interceptionMode", "REDIRECT"),
        ("traffic.sidecar.istio.io/includeOutboundIPRanges", "*"),
        ("traffic.sidecar.istio.io/includeInboundPorts", "*"),
        ("traffic.sidecar.istio.io/excludeInboundPorts", "15020"),
    ] {
        annotate(&mut template, name, value);
    }
    template
}

pub(crate) fn annotate(template: &mut Value, name: &str, value: &str) {
    let annotations = template.pointer_mut("/metadata/annotations").unwrap();
    with(annotations, name, json!(value));
}

pub(crate) fn load(cluster: &ExclusiveCluster<'_>, images: &[Image]) {
    for machine in cluster.machines() {
        images.iter().for_each(|image| machine.load(image).unwrap());
    }
}

/// Waits until a pod is redirected to its sidecar and unknown to ztunnel. The network is the chain's after an ADD,
/// empty for a discovered pod.
pub(crate) fn until_redirected(cluster: &ExclusiveCluster<'_>, pod: &Value, network: &str) {
    let (namespace, name) = named(pod);
    let none = json!([]);
    eventually("the pod is led to its sidecar", TIMEOUT, || {
        let known = explain_on(cluster.machine_of(pod), namespace, name)?;
        for (pointer, expected) in [
            ("/state", "POD_STATE_ENROLLED"),
            ("/desired", "ENROLLMENT_SIDECAR"),
            ("/reason", "REASON_SIDECAR_INJECTED"),
            ("/sandbox/networkName", network),
        ] {
            ensure!(text(&known, pointer) == expected, "{pointer}: {known}");
        }
        for pointer in ["/rules/differences", "/ztunnels"] {
            let found = known.pointer(pointer);
            ensure!(found.is_none_or(|it| *it == none), "{pointer}: {known}");
        }
        let object = cluster.pod(namespace, name)?;
        let shown = "/metadata/annotations/ambient.istio.io~1redirection";
        ensure!(text(&object, shown).is_empty(), "{object}");
        anyhow::Ok(())
    })
    .unwrap();
    let tables = cluster.in_netns(pod, &["nft", "list", "tables"]);
    assert!(tables.contains("inpod-nat"), "{tables}");
}

/// Returns whether a pod's proxy has logged a connection that it forwarded.
pub(crate) fn has_logged(
    cluster: &ExclusiveCluster<'_>,
    pod: &Value,
    from: SocketAddr,
    to: SocketAddr,
) -> bool {
    let reported = cluster.machine().log_of(uid(pod)).unwrap();
    reported.contains(&format!(" {from} {to} forwarded"))
}

fn until_logged(cluster: &ExclusiveCluster<'_>, pod: &Value, from: SocketAddr, to: SocketAddr) {
    eventually("the proxy tells of it", TIMEOUT, || {
        ensure!(
            has_logged(cluster, pod, from, to),
            "{from} to {to} is not told"
        );
        anyhow::Ok(())
    })
    .unwrap();
}

/// Expects the application's answer through its proxy.
pub(crate) fn serves_through_proxy(cluster: &ExclusiveCluster<'_>, pod: &Value) {
    let (from, seen) = ask(&cluster.outside, address(pod), WHO).unwrap();
    assert!(seen.contains(PROXY), "{seen}");
    until_logged(cluster, pod, from, address(pod));
}

/// Expects an answer without a proxy; returns the client's address as seen.
pub(crate) fn serves_by_itself(cluster: &ExclusiveCluster<'_>, pod: &Value) -> SocketAddr {
    let (from, seen) = ask(&cluster.outside, address(pod), WHO).unwrap();
    assert!(seen.contains(&from.ip().to_string()), "{seen}");
    from
}

/// Calls through the pod's proxy; returns what the other application saw.
fn calls_through_proxy(cluster: &ExclusiveCluster<'_>, pod: &Value, other: &Value) -> String {
    let netns = cluster.machine().netns_of(uid(pod)).unwrap();
    let (from, seen) = ask(&netns, address(other), WHO).unwrap();
    until_logged(cluster, pod, from, address(other));
    seen
}

/// Returns the pod's list of containers of one kind.
fn list<'a>(pod: &'a Value, pointer: &str) -> impl Iterator<Item = &'a Value> {
    let all = pod.pointer(pointer).and_then(Value::as_array);
    all.into_iter().flatten()
}

/// No container requests a capability from the API server, and no process has one.
pub(crate) fn assert_unprivileged(cluster: &ExclusiveCluster<'_>, pod: &Value) {
    let kinds = ["/spec/initContainers", "/spec/containers"];
    for container in kinds.into_iter().flat_map(|kind| list(pod, kind)) {
        let said = container.pointer("/securityContext").unwrap();
        assert_eq!(said.pointer("/privileged"), Some(&json!(false)), "{said}");
        let may = said.pointer("/allowPrivilegeEscalation");
        assert_eq!(may, Some(&json!(false)), "{said}");
        let rights = said.pointer("/capabilities");
        assert_eq!(rights, Some(&json!({"drop": ["ALL"]})), "{said}");
        assert_ne!(said.pointer("/runAsUser"), Some(&json!(0)), "{said}");
    }
    let statuses = ["/status/initContainerStatuses", "/status/containerStatuses"];
    for status in statuses.into_iter().flat_map(|kind| list(pod, kind)) {
        if status.pointer("/state/running").is_some() {
            assert_container_unprivileged(cluster, pod, status);
        }
    }
}

fn assert_container_unprivileged(cluster: &ExclusiveCluster<'_>, pod: &Value, status: &Value) {
    let id = text(status, "/containerID");
    let id = id.strip_prefix("containerd://").unwrap();
    let mut seen = 0;
    for pid in cluster.machine().pids(uid(pod)).unwrap() {
        let read = |name| fs::read_to_string(format!("/proc/{pid}/{name}"));
        // It may have ended.
        let (Ok(cgroup), Ok(process)) = (read("cgroup"), read("status")) else {
            continue;
        };
        if !cgroup.contains(id) {
            continue;
        }
        seen += 1;
        let of = |name| process.lines().find_map(|line| line.strip_prefix(name));
        for set in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
            let rights = of(set).unwrap().trim();
            assert_eq!(u64::from_str_radix(rights, 16), Ok(0), "{process}");
        }
        assert_eq!(of("NoNewPrivs:").unwrap().trim(), "1", "{process}");
        assert!(!of("Uid:").unwrap().contains("\t0"), "{process}");
    }
    assert!(seen > 0, "nothing of {status} runs");
}

#[test]
fn a_plain_and_a_native_sidecar_start_where_no_right_is_admitted_and_take_what_comes_and_goes() {
    on_the_node(|cluster| {
        load(cluster, &IMAGES);
        let (key, value) = RESTRICTED;
        cluster
            .make_namespace("cars", &json!({ key: value }))
            .unwrap();
        // The profile rejects a container that sets up redirection itself.
        let mut init = validation();
        let rights = json!({"runAsUser": 0, "capabilities": {"add": ["NET_ADMIN", "NET_RAW"]}});
        with(&mut init, "securityContext", rights);
        let own = template("own", &[init], &[application()]);
        let refused = make_pod(cluster, "cars", "own", &own)
            .unwrap_err()
            .to_string();
        assert!(refused.contains("PodSecurity"), "{refused}");
        let mut open = injected("open", Kind::Plain);
        annotate(
            &mut open,
            "traffic.sidecar.istio.io/excludeInboundPorts",
            "8080",
        );
        // Without the container that would fail, and without an injector's annotation.
        let apart = template("apart", &[], &[application(), proxy()]);
        for (name, template) in [
            ("plain", injected("plain", Kind::Plain)),
            ("native", injected("native", Kind::Native)),
            ("open", open),
            ("apart", apart),
        ] {
            make_pod(cluster, "cars", name, &template).unwrap();
        }
        let [plain, native, open, apart] =
            ["plain", "native", "open", "apart"].map(|name| ready(cluster, "cars", name));
        for (pod, other) in [(&plain, &native), (&native, &plain)] {
            until_redirected(cluster, pod, "podnet");
            assert_unprivileged(cluster, pod);
            serves_through_proxy(cluster, pod);
            let seen = calls_through_proxy(cluster, pod, other);
            assert!(seen.contains(PROXY), "{seen}");
            let validated = cluster.machine().log_of(uid(pod)).unwrap();
            for family in [
                "IPv4: a connection to 127.0.0.6:15002",
                "IPv6: a connection to [::6]:15002",
            ] {
                assert!(validated.contains(family), "{validated}");
            }
        }
        // An excluded port and an unredirected pod: the proxy sees nothing.
        let asked = serves_by_itself(cluster, &open);
        let stranger = serves_by_itself(cluster, &apart);
        calls_through_proxy(cluster, &open, &plain);
        assert!(!has_logged(cluster, &open, asked, address(&open)));
        assert!(!has_logged(cluster, &apart, stranger, address(&apart)));
        assert_eq!(cluster.in_netns(&apart, &["nft", "list", "tables"]), "");
        cluster.remove("cars");
    });
}

#[test]
fn ambient_pods_and_pods_with_a_sidecar_serve_each_other_on_one_node_before_and_after_a_power_cut()
{
    on_the_node(|cluster| {
        load(cluster, &IMAGES);
        // Its label does nothing beside a sidecar.
        cluster
            .make_namespace("both", &json!({"istio.io/dataplane-mode": "ambient"}))
            .unwrap();
        let ambient = deploy(cluster, "both", "ambient", &container(&json!({})));
        make_deployment(cluster, "both", "native", &injected("native", Kind::Native));
        let sidecar = ready(cluster, "both", "native");
        side_by_side(cluster, &ambient, &sidecar);
        let before = uid(&sidecar).to_owned();
        cluster.machine().reboot().unwrap();
        cluster.until_whole();
        let [ambient, sidecar] = ["ambient", "native"].map(|app| until_restarted(cluster, app));
        assert_eq!(uid(&sidecar), before);
        side_by_side(cluster, &ambient, &sidecar);
        cluster.remove("both");
    });
}

fn until_restarted(cluster: &ExclusiveCluster<'_>, app: &str) -> Value {
    eventually("the pod is back", integration::kubernetes::LONG, || {
        let pod = ready(cluster, "both", app);
        let was_restarted = |it: &Value| it.get("restartCount").is_some_and(|it| *it != json!(0));
        let is_new = list(&pod, "/status/containerStatuses").any(was_restarted);
        ensure!(is_new, "{pod}");
        anyhow::Ok(pod)
    })
    .unwrap()
}

fn side_by_side(cluster: &ExclusiveCluster<'_>, ambient: &Value, sidecar: &Value) {
    cluster.until_enrolled(ambient);
    until_redirected(cluster, sidecar, "podnet");
    serves_through_ztunnel(cluster, ambient);
    serves_through_proxy(cluster, sidecar);
    // Through the client's ztunnel and the server's proxy.
    let out = taken(cluster, ambient, 15001);
    let netns = cluster.machine().netns_of(uid(ambient)).unwrap();
    let (_, seen) = ask(&netns, address(sidecar), WHO).unwrap();
    assert!(seen.contains(PROXY), "{seen}");
    assert_eq!(taken(cluster, ambient, 15001), out + 1);
    // The opposite direction.
    let into = taken(cluster, ambient, 15006);
    calls_through_proxy(cluster, sidecar, ambient);
    assert_eq!(taken(cluster, ambient, 15006), into + 1);
    for listener in [15001, 15006, 15008] {
        assert_eq!(taken(cluster, sidecar, listener), 0, "went through ztunnel");
    }
}
