//! `inpod explain`, for a pod in each state.

use std::fs;

use anyhow::ensure;
use integration::{
    Call, Inhabitant, Node, SERVICES, Spec, TIMEOUT, connect, eventually, source_seen,
};
use serde_json::Value;

use crate::common::mesh::{Mesh, PORT};
use crate::netns::people::{columns, output_of, refused};

/// Returns facts and paragraphs' names, without variable parts.
fn shape(text: &str) -> Vec<String> {
    let (facts, rest) = text.split_once("\n\n").unwrap_or((text, ""));
    let stable = ["State", "Desired", "Remedy", "Next", "Annotation"];
    let facts = facts
        .lines()
        .filter(|line| stable.iter().any(|it| line.starts_with(it)));
    let names = rest
        .lines()
        .filter(|line| !line.starts_with(' ') && !line.is_empty());
    let spaces = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    facts.chain(names).map(spaces).collect()
}

pub(crate) fn explained(node: &Node, name: &str) -> String {
    output_of(node, &["explain", &format!("shop/{name}")])
}

/// The fields of a pod in the mesh, as JSON.
const FIELDS: [&str; 17] = [
    "addresses",
    "bypasses",
    "condition",
    "desired",
    "inputs",
    "netns",
    "netnsPath",
    "pod",
    "proof",
    "reason",
    "redirectionAnnotation",
    "remedy",
    "rules",
    "sandbox",
    "state",
    "timeline",
    "ztunnels",
];

#[test]
fn a_pod_that_is_in_the_mesh_is_explained_by_name_and_by_uid() {
    let node = Node::running().unwrap();
    let pod = node.pod(Spec::new("a").ambient()).unwrap();
    let text = explained(&node, "a");
    assert_eq!(
        shape(&text),
        [
            "State enrolled",
            "Desired ambient (LABEL_ON_POD)",
            "Remedy Nothing to do: the pod asked to join.",
            "Annotation missing (expected: enabled)",
            "Bypasses",
            "Proof",
            "Rules",
            "Ztunnels",
            "Inputs",
            "Timeline",
        ],
        "{text}"
    );
    let id = pod.netns.id();
    for said in [
        format!("Sandbox     podnet/{}/eth0", pod.container_id),
        format!("cookie {}", id.cookie),
        format!("Addresses   {}, {}", pod.v4, pod.v6),
        "  rules         confirmed  ".to_owned(),
        "  listeners     confirmed  ".to_owned(),
        "  workload      confirmed  ".to_owned(),
        "  connections   confirmed  ".to_owned(),
        "  capabilities  refuted    ".to_owned(),
        "  in sync (".to_owned(),
        "  listening: 15001, 15006, 15008".to_owned(),
        "  connections: 0 captured, 0 direct".to_owned(),
        "\nBypasses\n  Containers that may connect past ztunnel, as root with NET_RAW or NET_ADMIN: app (".to_owned(),
    ] {
        assert!(text.contains(&said), "{said}: {text}");
    }
    let by_uid = output_of(&node, &["explain", "--uid", &pod.spec.uid, "-o", "json"]);
    let by_name = output_of(&node, &["explain", "shop/a", "-o", "json"]);
    let parse = |text: &str| {
        let mut known: Value = serde_json::from_str(text).unwrap();
        // The broker computes that from its current clock.
        let said = known.pointer_mut("/ztunnels/0").unwrap().as_object_mut();
        said.unwrap().remove("acknowledgedAt").unwrap();
        // The other facts are confirmed for each response.
        let proof = known["proof"].as_array_mut().unwrap().iter_mut();
        proof.for_each(|fact| drop(fact.as_object_mut().unwrap().remove("confirmedAt")));
        known
    };
    assert_eq!(parse(&by_uid), parse(&by_name));
    let keys: Vec<_> = parse(&by_uid)
        .as_object()
        .unwrap()
        .keys()
        .cloned()
        .collect();
    assert_eq!(keys, FIELDS);
}

#[test]
fn a_pod_that_stays_outside_is_told_why_and_that_is_no_bypass() {
    let node = Node::running().unwrap();
    let labelled = |name: &str, rest: &str| {
        let manifest = Spec::new(name).ambient().manifest(node.name());
        let path = node.manifests().join(format!("{name}.yaml"));
        let (from, to) = rest.split_once(" => ").unwrap();
        assert!(manifest.contains(from), "{manifest}");
        fs::write(path, manifest.replace(from, to)).unwrap();
        node.until_known(&Spec::new(name)).unwrap();
    };
    labelled("host", "  nodeName: =>   hostNetwork: true\n  nodeName:");
    labelled("job", "phase: Running => phase: Succeeded");
    labelled("opted", "dataplane-mode: ambient => dataplane-mode: none");
    labelled(
        "sidecar",
        "metadata: => metadata:\n  annotations: {sidecar.istio.io/status: injected}",
    );
    labelled("plain", "dataplane-mode: ambient => other: label");
    for (name, reason) in [
        ("host", "HOST_NETWORK"),
        ("job", "POD_TERMINAL"),
        ("opted", "OPTED_OUT"),
        ("sidecar", "HAS_SIDECAR"),
        ("plain", "NOT_SELECTED"),
    ] {
        let text = explained(&node, name);
        let [state, desired, remedy, annotation, inputs] = shape(&text).try_into().unwrap();
        assert_eq!(state, "State out");
        assert_eq!(desired, format!("Desired none ({reason})"));
        assert!(remedy.len() > "Remedy ".len());
        assert_eq!(
            (annotation.as_str(), inputs.as_str()),
            ("Annotation none", "Inputs")
        );
    }
}

#[test]
fn a_pod_of_a_namespace_that_nobody_knows_is_unknown_and_one_that_nobody_knows_is_refused() {
    let node = Node::running().unwrap();
    let stray = Spec {
        namespace: "bank".to_owned(),
        ..Spec::new("stray")
    };
    node.write_manifest(&stray).unwrap();
    node.until_known(&stray).unwrap();
    fs::write(
        node.manifests().join("broken.yaml"),
        "kind: Pod\nmetadata: [",
    )
    .unwrap();
    eventually("the gap is seen", TIMEOUT, || {
        let text = output_of(&node, &["explain", "bank/stray"]);
        ensure!(text.contains("unknown (NAMESPACE_UNKNOWN)"), "{text}");
        anyhow::Ok(())
    })
    .unwrap();
    let (code, said) = refused(&node, &["explain", "bank/nobody"]);
    assert_eq!(code, 1);
    assert!(
        said.contains("POD_UNKNOWN") && said.contains("What to do: "),
        "{said}"
    );
    assert!(said.contains("pod-events/grpc.sock"), "{said}");
}

#[test]
fn a_pod_that_ztunnel_refuses_is_unhealthy_with_ztunnels_error_and_what_comes_next() {
    let node = Node::new().unwrap();
    SERVICES
        .iter()
        .try_for_each(|service| node.start(service))
        .unwrap();
    node.start_ztunnel(&["--fault", "nack-adds"]).unwrap();
    node.ready().unwrap();
    let refused = node.sandbox(Spec::new("refused").ambient()).unwrap();
    let outcome = node
        .call(Call::add, &refused)
        .timeout_seconds(5)
        .run()
        .unwrap();
    assert_eq!(outcome.code, 1, "{outcome:?}");
    let text = explained(&node, "refused");
    assert!(text.contains("\nFailure     ZTUNNEL_"), "{text}");
    assert!(!text.contains("\nBypasses\n"), "it never ran: {text}");
    let waits = node.pod(Spec::new("waits")).unwrap();
    node.write_manifest(&waits.spec.clone().ambient()).unwrap();
    eventually("it waits", TIMEOUT, || {
        let text = explained(&node, "waits");
        ensure!(text.contains("\nFailure     ZTUNNEL_"), "{text}");
        ensure!(text.contains(": enroll it\n"), "{text}");
        ensure!(
            text.contains("\nBypasses\n  It should be in the mesh but is not yet"),
            "{text}"
        );
        anyhow::Ok(())
    })
    .unwrap();
    let unhealthy = columns(&output_of(&node, &["pods", "--unhealthy"]));
    let names: Vec<_> = unhealthy
        .iter()
        .filter_map(|line| line.split(' ').nth(1))
        .collect();
    assert_eq!(names, ["NAME", "refused", "waits"], "{unhealthy:?}");
}

#[test]
fn a_pod_that_leaves_and_one_that_ends_say_what_is_waited_for() {
    let mesh = Mesh::new().unwrap();
    let node = &mesh.node;
    let direct = connect(&mesh.outsider.netns, (mesh.b.v4, PORT).into()).unwrap();
    let (_, _captured) = source_seen(direct).unwrap();
    let leaves = Spec {
        mode: None,
        ..mesh.b.spec.clone()
    };
    node.write_manifest(&leaves).unwrap();
    eventually("it drains", TIMEOUT, || {
        let text = explained(node, "b");
        ensure!(text.contains("State       withdrawing"), "{text}");
        ensure!(
            text.contains("new connections go direct, captured ones continue"),
            "{text}"
        );
        ensure!(text.contains("remove its rules once no captured"), "{text}");
        ensure!(text.contains("connections: 1 captured"), "{text}");
        anyhow::Ok(())
    })
    .unwrap();
    let _app = Inhabitant::of(&mesh.a).unwrap();
    node.call(Call::del, &mesh.a).run().unwrap();
    eventually("it ends", TIMEOUT, || {
        let text = explained(node, "a");
        ensure!(text.contains("State       deleting"), "{text}");
        ensure!(text.contains("forget its sandbox once only"), "{text}");
        anyhow::Ok(())
    })
    .unwrap();
}

#[test]
fn a_pod_that_is_gone_from_the_source_is_explained_by_what_is_recorded() {
    let node = Node::running().unwrap();
    let pod = node.pod(Spec::new("a").ambient()).unwrap();
    let _app = Inhabitant::of(&pod).unwrap();
    fs::remove_file(node.manifests().join("shop-a.yaml")).unwrap();
    eventually("it is gone", TIMEOUT, || {
        let text = explained(&node, "a");
        ensure!(text.contains("none (POD_UNKNOWN)"), "{text}");
        ensure!(text.contains("once no process runs in it"), "{text}");
        anyhow::Ok(())
    })
    .unwrap();
}
