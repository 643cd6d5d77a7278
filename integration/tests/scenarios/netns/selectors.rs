//! Selectors and a pod's exclusions: decided, applied, and seen in traffic.

use std::{fs, net::SocketAddr};

use anyhow::ensure;
use inpod_proto::{podevents::v1::PodState, types::v1::Reason};
use inpod_types::keys;
use integration::{
    App, Node, Pod, Spec, State, TIMEOUT, ask, connect, eventually, exchange, source_seen,
};
use nix::sys::signal::Signal;

use crate::netns::people::output_of;

const PORT: u16 = 8080;
const OTHER: u16 = 9090;
const NOTHING: Vec<String> = Vec::new();

fn node(settings: &[&str]) -> Node {
    let node = Node::new().unwrap();
    node.start("netconfig").unwrap();
    node.start("ztunnel-broker").unwrap();
    start(&node, settings);
    node.start_ztunnel(&[]).unwrap();
    node.ready().unwrap();
    node
}

fn start(node: &Node, settings: &[&str]) {
    let settings = [&["--peer", "uid"], settings].concat();
    node.start_with("pod-events", &settings).unwrap();
}

/// Labels and annotations are YAML.
fn shop(node: &Node, labels: &str, annotations: &str) {
    let path = node.manifests().join("namespace.yaml");
    let text = format!(
        "kind: Namespace\nmetadata: {{name: shop, labels: {{{labels}}}, annotations: {{{annotations}}}}}\n"
    );
    fs::write(path.with_extension("tmp"), text).unwrap();
    fs::rename(path.with_extension("tmp"), path).unwrap();
}

fn in_bank(name: &str) -> Spec {
    Spec {
        namespace: "bank".to_owned(),
        ..Spec::new(name)
    }
}

fn until_decided(node: &Node, spec: &Spec, reason: Reason) {
    eventually(reason.as_str_name(), TIMEOUT, || {
        let known = node.explain(spec)?;
        ensure!(known.reason() == reason, "{:?}", known.reason());
        anyhow::Ok(())
    })
    .unwrap();
}

/// Waits until a pod is out for a reason, without a trace.
fn until_out(node: &Node, pod: &Pod, reason: Reason) {
    until_decided(node, &pod.spec, reason);
    node.until(&pod.spec, PodState::Out, TIMEOUT).unwrap();
    assert_eq!(pod.traces().unwrap(), NOTHING);
}

fn input(node: &Node, spec: &Spec, name: &str) -> Option<String> {
    let inputs = node.explain(spec).unwrap().inputs;
    let input = inputs.into_iter().find(|input| input.name == name);
    input.map(|input| input.value)
}

/// Returns listeners that accepted one pod's connection to another, over both families.
fn taken(node: &Node, from: &Pod, to: &Pod, port: u16) -> Vec<u64> {
    let before = node.accesses().unwrap().len();
    for address in to.addresses() {
        ask(&from.netns, SocketAddr::new(address, port)).unwrap();
    }
    let all = node.accesses().unwrap().into_iter().skip(before);
    let accepted = all.filter(|access| access.event == "accepted");
    accepted.map(|access| access.listener).collect()
}

fn rules(pod: &Pod) -> String {
    pod.exec(&["nft", "-s", "list", "ruleset"]).unwrap()
}

#[test]
fn custom_selectors_decide_who_is_captured_and_istios_label_says_nothing_then() {
    let selectors = "[{podSelector: {matchLabels: {mesh: wanted}}}, \
                     {podSelector: {matchExpressions: [{key: mesh, operator: NotIn, values: [unwanted]}]}, \
                      namespaceSelector: {matchExpressions: [{key: team, operator: In, values: [a, b]}]}}]";
    let node = node(&["--enablement-selectors", selectors]);
    shop(&node, "team: b", "");
    let by_namespace = node.pod(Spec::new("by-namespace")).unwrap();
    let unwanted = node
        .pod(Spec::new("unwanted").label("mesh", "unwanted"))
        .unwrap();
    let by_pod = node.pod(in_bank("by-pod").label("mesh", "wanted")).unwrap();
    let outsider = node.pod(in_bank("outsider").ambient()).unwrap();
    let all = [&by_namespace, &unwanted, &by_pod, &outsider];
    let _apps = all.map(|pod| App::start(&pod.netns, PORT).unwrap());
    for (pod, reason, listeners) in [
        (&by_namespace, Reason::LabelOnNamespace, vec![15006, 15006]),
        (&by_pod, Reason::LabelOnPod, vec![15006, 15006]),
        (&unwanted, Reason::NotSelected, vec![]),
    ] {
        assert_eq!(node.explain(&pod.spec).unwrap().reason(), reason);
        assert_eq!(taken(&node, &outsider, pod, PORT), listeners, "{reason:?}");
    }
    assert_eq!(outsider.traces().unwrap(), NOTHING);
    let reported = |spec, name| input(&node, spec, name);
    let entry = reported(&by_namespace.spec, "enablement selector");
    assert_eq!(entry.as_deref(), Some("entry 2 of 2"));
    let team = reported(&by_namespace.spec, "namespace label team");
    assert_eq!(team.as_deref(), Some("b"));
    let mesh = reported(&unwanted.spec, "pod label mesh");
    assert_eq!(mesh.as_deref(), Some("unwanted"));
}

#[test]
fn a_namespace_is_selected_by_its_name_without_a_label_or_a_manifest() {
    let selectors = format!(
        "[{{namespaceSelector: {{matchLabels: {{{}: shop}}}}}}]",
        keys::NAMESPACE_NAME
    );
    let node = node(&["--enablement-selectors", &selectors]);
    let pod = node.pod(Spec::new("a")).unwrap();
    node.until_whole(&pod.spec).unwrap();
    let outsider = node.pod(in_bank("outsider").ambient()).unwrap();
    assert_eq!(outsider.traces().unwrap(), NOTHING);
}

// scenario: 69
#[test]
fn a_sandboxed_runtime_stays_out_until_the_setting_lacks_it() {
    let node = node(&[]);
    shop(&node, "istio.io/dataplane-mode: ambient", "");
    let kata = node.pod(Spec::new("vm").of_runtime("kata-qemu")).unwrap();
    let injected = Spec::new("side").injected().of_runtime("gvisor");
    let injected = node.pod(injected).unwrap();
    let usual = node.pod(Spec::new("usual").of_runtime("runc")).unwrap();
    node.until_whole(&usual.spec).unwrap();
    until_out(&node, &injected, Reason::SandboxedRuntime);
    until_out(&node, &kata, Reason::SandboxedRuntime);
    let text = output_of(&node, &["explain", "shop/vm"]);
    let lines = text.lines().map(|line| line.split_whitespace().collect());
    let lines: Vec<Vec<_>> = lines.collect();
    for line in [
        "State out",
        "Desired none (SANDBOXED_RUNTIME)",
        "pod runtimeClassName kata-qemu",
    ] {
        let words: Vec<_> = line.split(' ').collect();
        assert!(lines.contains(&words), "{line}: {text}");
    }
    assert!(text.contains(inpod_types::Reason::SandboxedRuntime.remedy()));
    let listed = output_of(&node, &["pods"]);
    assert!(listed.contains("SANDBOXED_RUNTIME"), "{listed}");
    node.stop("pod-events", Signal::SIGTERM).unwrap();
    start(&node, &["--sandboxed-runtime-classes", "gvisor,runsc"]);
    node.until_whole(&kata.spec).unwrap();
    assert_eq!(
        node.explain(&kata.spec).unwrap().reason(),
        Reason::LabelOnNamespace
    );
    until_out(&node, &injected, Reason::SandboxedRuntime);
}

#[test]
fn a_pod_that_opts_out_leaves_an_enrolled_namespace_and_joins_again_without_the_label() {
    let node = node(&[]);
    shop(&node, "istio.io/dataplane-mode: ambient", "");
    let pod = node.pod(Spec::new("a")).unwrap();
    node.until_whole(&pod.spec).unwrap();
    let opted_out = Spec {
        mode: Some("none".to_owned()),
        ..pod.spec.clone()
    };
    node.write_manifest(&opted_out).unwrap();
    until_out(&node, &pod, Reason::OptedOut);
    node.write_manifest(&pod.spec).unwrap();
    node.until_whole(&pod.spec).unwrap();
}

#[test]
fn a_namespace_that_moves_from_one_selector_to_another_has_its_pods_decided_again() {
    let entry = |team: &str| {
        format!(
            "{{podSelector: {{matchLabels: {{app: {team}}}}}, namespaceSelector: {{matchLabels: {{team: {team}}}}}}}"
        )
    };
    let selectors = format!("[{}, {}]", entry("a"), entry("b"));
    let node = node(&["--enablement-selectors", &selectors]);
    shop(&node, "team: a", "");
    let a = node.pod(Spec::new("a")).unwrap();
    let b = node.pod(Spec::new("b")).unwrap();
    node.until_whole(&a.spec).unwrap();
    until_out(&node, &b, Reason::NotSelected);
    shop(&node, "team: b", "");
    node.until_whole(&b.spec).unwrap();
    until_out(&node, &a, Reason::NotSelected);
    let list = fs::read_to_string(node.state_dir().join("enrolled-namespaces")).unwrap();
    assert!(list.contains("shop"), "{list}");
}

#[test]
fn pods_of_a_namespace_that_a_restart_finds_excluded_leave_the_mesh_and_others_stay() {
    let node = node(&[]);
    let (pod, other) = (Spec::new("a").ambient(), in_bank("b").ambient());
    let (pod, other) = (node.pod(pod).unwrap(), node.pod(other).unwrap());
    node.until_whole(&pod.spec).unwrap();
    let untouched = rules(&other);
    node.stop("pod-events", Signal::SIGTERM).unwrap();
    start(&node, &["--exclude-namespaces", "shop"]);
    until_out(&node, &pod, Reason::NamespaceExcluded);
    node.until_whole(&other.spec).unwrap();
    assert_eq!(rules(&other), untouched);
    eventually("the plugin knows", TIMEOUT, || {
        let list = fs::read_to_string(node.state_dir().join("enrolled-namespaces"))?;
        ensure!(list.contains("bank") && !list.contains("shop"), "{list}");
        anyhow::Ok(())
    })
    .unwrap();
}

/// Excludes its port 8080 in both directions; it and an outsider have two applications each.
struct Excluding {
    pod: Pod,
    outsider: Pod,
    _apps: [App; 4],
    node: Node,
}

impl Excluding {
    fn new(settings: &[&str], annotations: &str) -> Self {
        let node = node(settings);
        shop(&node, "", annotations);
        let port = PORT.to_string();
        let spec = Spec::new("a")
            .ambient()
            .annotate(keys::EXCLUDE_OUTBOUND_PORTS, &port)
            .annotate(keys::EXCLUDE_INBOUND_PORTS, &format!(" {port} ,"));
        let pod = node.pod(spec).unwrap();
        let outsider = node.pod(in_bank("outsider")).unwrap();
        let app = |pod: &Pod, port| App::start(&pod.netns, port).unwrap();
        let apps = [
            (&pod, PORT),
            (&pod, OTHER),
            (&outsider, PORT),
            (&outsider, OTHER),
        ];
        Self {
            _apps: apps.map(|(pod, port)| app(pod, port)),
            pod,
            outsider,
            node,
        }
    }

    /// Port 8080 may be captured; port 9090 always is.
    fn is_captured(&self) -> bool {
        let listeners = |port| {
            let out = taken(&self.node, &self.pod, &self.outsider, port);
            let into = taken(&self.node, &self.outsider, &self.pod, port);
            [out, into].concat()
        };
        const ALL: [u64; 4] = [15001, 15001, 15006, 15006];
        assert_eq!(listeners(OTHER), ALL);
        let found = listeners(PORT);
        assert!(found == ALL || found.is_empty(), "{found:?}");
        !found.is_empty()
    }

    fn reported_exclusions(&self) -> String {
        let name = format!("pod annotation {}", keys::EXCLUDE_OUTBOUND_PORTS);
        input(&self.node, &self.pod.spec, &name).unwrap()
    }

    fn events(&self) -> usize {
        let log = self.node.tail("pod-events", usize::MAX);
        let reported = |line: &&str| {
            line.contains("NOT_PERMITTED") && line.contains(keys::EXCLUDE_INBOUND_PORTS)
        };
        log.lines().filter(reported).count()
    }
}

#[test]
fn exclusions_that_nobody_permits_are_left_out_and_told_once() {
    let mesh = Excluding::new(&[], "inpod.io/allow: \"keep-existing, excluded\"");
    assert!(mesh.is_captured());
    assert_eq!(mesh.reported_exclusions(), "8080 (not permitted)");
    assert_eq!(mesh.events(), 1);
    // A restart enrolls no pod again.
    mesh.node.stop("pod-events", Signal::SIGTERM).unwrap();
    start(&mesh.node, &[]);
    mesh.node.ready().unwrap();
    mesh.node.until_whole(&mesh.pod.spec).unwrap();
    assert!(mesh.is_captured());
    assert_eq!(mesh.events(), 1);
}

#[test]
fn exclusions_that_the_namespace_permits_are_granted_until_it_does_so_no_more() {
    let mesh = Excluding::new(&[], "inpod.io/allow: exclude");
    assert!(!mesh.is_captured());
    assert_eq!(
        (mesh.reported_exclusions().as_str(), mesh.events()),
        ("8080", 0)
    );
    shop(&mesh.node, "", "");
    eventually("it is known", TIMEOUT, || {
        let reported = mesh.reported_exclusions();
        ensure!(reported == "8080 (not permitted)", "{reported}");
        anyhow::Ok(())
    })
    .unwrap();
    mesh.node.add(&mesh.pod).unwrap();
    assert!(mesh.is_captured());
}

#[test]
fn exclusions_that_the_node_permits_are_granted_and_outlive_a_restart() {
    let settings = ["--pods-may", "exclude"];
    let mesh = Excluding::new(&settings, "");
    assert!(!mesh.is_captured());
    let before = rules(&mesh.pod);
    mesh.node.stop("pod-events", Signal::SIGKILL).unwrap();
    start(&mesh.node, &settings);
    mesh.node.ready().unwrap();
    mesh.node.until_whole(&mesh.pod.spec).unwrap();
    assert_eq!(rules(&mesh.pod), before);
    assert!(!mesh.is_captured());
}

#[test]
fn networks_that_are_excluded_are_reached_directly() {
    let node = node(&["--pods-may", "exclude"]);
    let outsider = node.pod(in_bank("outsider")).unwrap();
    let far = node.pod(in_bank("far")).unwrap();
    let [v4, v6] = outsider.addresses();
    let networks = format!("{v4}/32,{v6}/128");
    let spec = Spec::new("a").ambient();
    let spec = spec.annotate(keys::EXCLUDE_OUTBOUND_CIDRS, &networks);
    let pod = node
        .pod(spec.annotate(keys::EXCLUDE_INBOUND_CIDRS, &networks))
        .unwrap();
    let _apps = [&outsider, &far, &pod].map(|pod| App::start(&pod.netns, PORT).unwrap());
    assert_eq!(taken(&node, &pod, &outsider, PORT), [0; 0]);
    assert_eq!(taken(&node, &outsider, &pod, PORT), [0; 0]);
    assert_eq!(taken(&node, &pod, &far, PORT), [15001, 15001]);
    assert_eq!(taken(&node, &far, &pod, PORT), [15006, 15006]);
}

#[test]
fn a_permitted_list_that_cannot_be_understood_refuses_the_add_by_name_and_changes_nothing() {
    let node = node(&["--pods-may", "exclude"]);
    for (annotation, text) in [
        (keys::EXCLUDE_OUTBOUND_PORTS, "443,http"),
        (keys::EXCLUDE_OUTBOUND_CIDRS, "10.0.0.1/8"),
        (keys::EXCLUDE_INBOUND_PORTS, "15008"),
        (keys::EXCLUDE_INBOUND_CIDRS, "everywhere"),
    ] {
        let spec = Spec::new("a").ambient();
        let pod = node
            .sandbox(spec.clone().annotate(annotation, text))
            .unwrap();
        // The source is asked, whatever it shows of an earlier pod.
        until_decided(&node, &pod.spec, Reason::LabelOnPod);
        let name = format!("pod annotation {annotation}");
        eventually("it is shown", TIMEOUT, || {
            input(&node, &pod.spec, &name).ok_or("not yet")
        })
        .unwrap();
        let before = State::of(&node, &[&pod]).unwrap();
        let outcome = node.call(integration::Call::add, &pod).run().unwrap();
        assert_ne!(outcome.code, 0, "{outcome:?}");
        assert!(outcome.stdout.contains(annotation), "{outcome:?}");
        assert!(outcome.stdout.contains("INVALID_FIELD"), "{outcome:?}");
        before.unchanged(&node, &[&pod]).unwrap();
        pod.unmount().unwrap();
    }
}

#[test]
fn a_pod_in_the_mesh_keeps_what_it_has_when_its_list_cannot_be_understood_any_more() {
    let mesh = Excluding::new(&["--pods-may", "exclude"], "");
    let before = rules(&mesh.pod);
    let mut spec = mesh.pod.spec.clone();
    spec.annotations = vec![(keys::EXCLUDE_OUTBOUND_PORTS, "http".to_owned())];
    mesh.node.write_manifest(&spec).unwrap();
    eventually("it is reported", TIMEOUT, || {
        let reported = mesh.reported_exclusions();
        ensure!(reported.contains("\"http\" is not a valid"), "{reported}");
        anyhow::Ok(())
    })
    .unwrap();
    mesh.node.add(&mesh.pod).unwrap();
    assert_eq!(rules(&mesh.pod), before);
    assert!(!mesh.is_captured());
}

/// A connection from before the enrollment survives in a pod that asks for that.
fn survives(settings: &[&str]) -> bool {
    let node = node(settings);
    let spec = Spec::new("a").annotate(keys::KEEP_EXISTING_CONNECTIONS, "true");
    let pod = node.pod(spec).unwrap();
    let outsider = node.pod(in_bank("outsider")).unwrap();
    let _apps = [&pod, &outsider].map(|pod| App::start(&pod.netns, PORT).unwrap());
    let to = SocketAddr::new(pod.v4.into(), PORT);
    let (_, mut old) = source_seen(connect(&outsider.netns, to).unwrap()).unwrap();
    exchange(&mut old, "before").unwrap();
    node.write_manifest(&pod.spec.clone().ambient()).unwrap();
    node.until_whole(&pod.spec).unwrap();
    assert_eq!(taken(&node, &outsider, &pod, PORT), [15006, 15006]);
    assert_eq!(taken(&node, &pod, &outsider, PORT), [15001, 15001]);
    exchange(&mut old, "after").is_ok()
}

#[test]
fn connections_from_before_the_enrollment_go_on_where_that_is_granted_and_only_there() {
    assert!(survives(&["--pods-may", "keep-existing"]));
    assert!(!survives(&["--pods-may", "exclude"]));
}

#[test]
fn a_pod_that_is_refused_is_explained_with_the_annotation_to_correct() {
    let node = node(&["--pods-may", "exclude"]);
    let spec = Spec::new("a").ambient();
    let pod = node
        .sandbox(spec.annotate(keys::EXCLUDE_INBOUND_PORTS, "http"))
        .unwrap();
    let outcome = node.call(integration::Call::add, &pod).run().unwrap();
    assert_ne!(outcome.code, 0);
    let failure = node.explain(&pod.spec).unwrap().last_failure.unwrap();
    assert_eq!(failure.reason(), Reason::InvalidField);
    assert_eq!(failure.field, keys::EXCLUDE_INBOUND_PORTS);
    // Correcting the manifest suffices.
    node.write_manifest(&Spec::new("a").ambient()).unwrap();
    eventually("it starts", TIMEOUT, || node.add(&pod)).unwrap();
    node.until_whole(&pod.spec).unwrap();
}
