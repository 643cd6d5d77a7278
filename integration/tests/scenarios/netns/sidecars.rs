//! Pods with a sidecar, redirected to their own proxy without broker and ztunnel.

mod leaving;
mod running;

use std::{fs, time::Duration};

use anyhow::{Context as _, ensure};
use inpod_proto::{
    podevents::v1::{ExplainPodResponse, PodState},
    types::v1::{Enrollment, Reason},
};
use inpod_types::keys;
use integration::{Call, Cgroups, Inhabitant, Node, Pod, Spec, TIMEOUT, eventually};
use nix::sys::signal::Signal;

/// The node never had a broker or a ztunnel.
fn without_ztunnel() -> Node {
    let node = Node::new().unwrap();
    node.start("netconfig").unwrap();
    node.start("pod-events").unwrap();
    // Not ready: it has no ztunnel.
    eventually("pod-events answers", TIMEOUT, || node.api().status()).unwrap();
    node
}

/// Waits until exactly its rules redirect a pod to its sidecar, unknown to ztunnel.
fn until_redirected(node: &Node, pod: &Pod) -> ExplainPodResponse {
    let what = format!("{} is redirected to its sidecar", pod.spec.name);
    let known = eventually(&what, TIMEOUT, || {
        let known = node.explain(&pod.spec)?;
        ensure!(known.state() == PodState::Enrolled, "{known:?}");
        let rules = known.rules.as_ref().context("no rules reported")?;
        ensure!(rules.differences.is_empty(), "{:?}", rules.differences);
        anyhow::Ok(known)
    });
    let known = known.unwrap();
    assert!(known.ztunnels.is_empty() && known.unavailable.is_empty());
    assert_eq!(known.redirection_annotation, "");
    known
}

fn input<'a>(known: &'a ExplainPodResponse, name: &str) -> &'a str {
    let input = known.inputs.iter().find(|input| input.name == name);
    input.map_or("not told", |input| &input.value)
}

/// Includes the kernel's handles, which change when rules are rewritten.
fn rules(pod: &Pod) -> String {
    let rules = pod.exec(&["nft", "-s", "-a", "list", "ruleset"]).unwrap();
    assert!(rules.contains("15001"), "{rules}");
    rules
}

fn changed(node: &Node, pod: &mut Pod, change: impl FnOnce(Spec) -> Spec) {
    pod.spec = change(pod.spec.clone());
    node.write_manifest(&pod.spec).unwrap();
}

fn noted(known: &ExplainPodResponse, event: &str) -> bool {
    let mut entries = known.timeline.iter();
    entries.any(|entry| entry.event.contains(event))
}

fn claims(node: &Node) -> usize {
    node.api().claims().unwrap().len()
}

#[test]
fn a_pod_with_a_sidecar_is_redirected_where_no_broker_and_no_ztunnel_ever_was() {
    let node = without_ztunnel();
    for spec in [
        Spec::new("plain").injected(),
        Spec::new("native").injected_natively(),
        // The label does nothing beside a sidecar.
        Spec::new("both").injected().ambient(),
    ] {
        let pod = node.pod(spec).unwrap();
        // ADD's answer is final: no wait.
        assert!(rules(&pod).contains("15006"));
        let known = until_redirected(&node, &pod);
        assert_eq!(known.desired(), Enrollment::Sidecar);
        assert_eq!(known.reason(), Reason::SidecarInjected);
        assert_eq!(input(&known, "sidecar: user and group"), "1337, 1337");
        let check = node.call(Call::add, &pod).with_var("CNI_COMMAND", "CHECK");
        let check = check.with_key("cniVersion", "1.1.0").run().unwrap();
        assert_eq!(check.code, 0, "{check:?}");
        node.del(&pod).unwrap();
        eventually("its claim is released", TIMEOUT, || {
            ensure!(node.api().claims()?.is_empty());
            anyhow::Ok(())
        })
        .unwrap();
    }
}

#[test]
fn the_namespace_of_a_pod_with_a_sidecar_is_enrolled_for_the_plugin() {
    let node = without_ztunnel();
    let pod = node.pod(Spec::new("web").injected()).unwrap();
    eventually("the namespace is listed", TIMEOUT, || {
        let list = fs::read_to_string(node.state_dir().join("enrolled-namespaces"))?;
        ensure!(list.lines().any(|line| line.contains("shop")), "{list}");
        anyhow::Ok(())
    })
    .unwrap();
    node.stop("pod-events", Signal::SIGKILL).unwrap();
    let late = node.sandbox(Spec::new("late").injected()).unwrap();
    let outcome = node
        .call(Call::add, &late)
        .timeout_seconds(3)
        .run()
        .unwrap();
    assert_eq!(outcome.refusal().unwrap().0, 11);
    assert_eq!(late.traces().unwrap(), Vec::<String>::new());
    drop(pod);
}

#[test]
fn each_skip_condition_leaves_the_pod_alone_and_is_explained() {
    let node = without_ztunnel();
    let with = |name: &str, container: &str| {
        let mut spec = Spec::new(name).annotate(keys::SIDECAR_STATUS, "{}");
        spec.containers.push(container.to_owned());
        spec
    };
    let mut init = Spec::new("init").injected();
    init.init_containers
        .push("{name: istio-init, image: i}".to_owned());
    let grpc = "{name: istio-proxy, image: p, env: [{name: DISABLE_ENVOY, value: \"true\"}]}";
    for (spec, why) in [
        (init, "istio-init"),
        (with("grpc", grpc), "DISABLE_ENVOY"),
        (
            with("other", "{name: helper, image: h}"),
            "no container istio-proxy",
        ),
        (
            with(
                "router",
                "{name: istio-proxy, image: p, args: [proxy, router]}",
            ),
            "arguments",
        ),
        (
            Spec::new("out")
                .injected()
                .label(keys::SIDECAR_INJECT, "false"),
            keys::SIDECAR_INJECT,
        ),
        (
            Spec::new("mode")
                .injected()
                .annotate(keys::INTERCEPTION_MODE, "NONE"),
            "NONE",
        ),
    ] {
        let pod = node.pod(spec.ambient()).unwrap();
        let known = node.explain(&pod.spec).unwrap();
        let name = &pod.spec.name;
        assert_eq!(known.state(), PodState::Out, "{name}");
        assert_eq!(known.desired(), Enrollment::None, "{name}");
        assert_eq!(known.reason(), Reason::HasSidecar, "{name}");
        let reported = input(&known, "reason for no redirection to the sidecar");
        assert!(reported.contains(why), "{name}: {reported}");
        assert_eq!(pod.traces().unwrap(), Vec::<String>::new(), "{name}");
    }
    assert_eq!(claims(&node), 0);
}

#[test]
fn a_malformed_annotation_refuses_the_add_by_its_name_and_changes_nothing() {
    let node = without_ztunnel();
    for (name, annotation, value) in [
        ("mode", keys::INTERCEPTION_MODE, "redirect"),
        ("ports", keys::SIDECAR_EXCLUDE_INBOUND_PORTS, "*"),
        (
            "networks",
            keys::SIDECAR_INCLUDE_NETWORKS,
            "10.0.0.0/8, 11.0.0.0/8",
        ),
        (
            "interfaces",
            keys::SIDECAR_EXCLUDE_INTERFACES,
            "eth0 -j ACCEPT",
        ),
    ] {
        let spec = Spec::new(name).injected().annotate(annotation, value);
        let pod = node.sandbox(spec).unwrap();
        let outcome = node.call(Call::add, &pod).run().unwrap();
        assert_ne!(outcome.code, 0, "{outcome:?}");
        for word in [annotation, "INVALID_FIELD", "; give "] {
            assert!(outcome.stdout.contains(word), "{word}: {outcome:?}");
        }
        assert_eq!(pod.traces().unwrap(), Vec::<String>::new());
        assert_eq!(claims(&node), 0);
        let known = node.explain(&pod.spec).unwrap();
        let failure = known.last_failure.clone().unwrap();
        assert_eq!(
            (failure.reason(), failure.field.as_str()),
            (Reason::InvalidField, annotation)
        );
        let reported = input(&known, &format!("pod annotation {annotation}"));
        assert!(
            reported == value || reported.starts_with("malformed"),
            "{reported}"
        );
    }
}

#[test]
fn ambient_pods_and_pods_with_a_sidecar_live_side_by_side_through_every_restart() {
    let node = Node::running().unwrap();
    let ambient = node.pod(Spec::new("ambient").ambient()).unwrap();
    let sidecar = node.pod(Spec::new("sidecar").injected()).unwrap();
    let before = rules(&sidecar);
    let both = || {
        node.until_whole(&ambient.spec).unwrap();
        let known = until_redirected(&node, &sidecar);
        let workloads = node.api().workloads().unwrap().workloads;
        assert_eq!(workloads.len(), 1, "{workloads:?}");
        assert!(!noted(&known, "repaired"), "{:?}", known.timeline);
        assert_eq!(rules(&sidecar), before, "written without need");
    };
    both();
    for service in ["pod-events", "netconfig", "ztunnel-broker"] {
        node.stop(service, Signal::SIGKILL).unwrap();
        node.start(service).unwrap();
        node.ready().unwrap();
        eventually("every claim is back", TIMEOUT, || {
            ensure!(node.api().claims()?.len() == 2);
            anyhow::Ok(())
        })
        .unwrap();
        both();
    }
    node.del(&sidecar).unwrap();
    node.until_whole(&ambient.spec).unwrap();
    assert_eq!(claims(&node), 1);
}

#[test]
fn a_pod_with_a_sidecar_that_started_while_the_plugin_was_missing_is_found_and_redirected() {
    let node = without_ztunnel();
    let cgroups = Cgroups::new().unwrap();
    let spec = Spec {
        uid: "5a0d9c12-41c6-4e3d-9d0e-2b1c6e5f7a91".to_owned(),
        ..Spec::new("missed").injected()
    };
    let mut pod = node.sandbox(spec).unwrap();
    let inhabitant = Inhabitant::of(&pod).unwrap();
    cgroups.put(&pod, inhabitant.pid()).unwrap();
    assert_eq!(pod.traces().unwrap(), Vec::<String>::new());
    // A malformed annotation is reported and not recorded.
    let [v4, v6] = pod.addresses();
    changed(&node, &mut pod, |spec| Spec {
        addresses: vec![v4, v6],
        ..spec.annotated(keys::INTERCEPTION_MODE, "nft")
    });
    let refused = eventually("the failure is reported", TIMEOUT, || {
        node.explain(&pod.spec)?.last_failure.context("no failure")
    })
    .unwrap();
    assert_eq!(refused.field, keys::INTERCEPTION_MODE);
    assert_eq!(claims(&node), 0);
    changed(&node, &mut pod, |spec| {
        spec.annotated(keys::INTERCEPTION_MODE, "REDIRECT")
    });
    eventually("it is found", Duration::from_secs(40), || {
        let known = node.explain(&pod.spec)?;
        ensure!(known.state() == PodState::Enrolled, "{known:?}");
        anyhow::Ok(())
    })
    .unwrap();
    until_redirected(&node, &pod);
    rules(&pod);
    // A discovered pod is known after a restart.
    node.stop("pod-events", Signal::SIGKILL).unwrap();
    node.start("pod-events").unwrap();
    until_redirected(&node, &pod);
    assert_eq!(claims(&node), 1);
}
