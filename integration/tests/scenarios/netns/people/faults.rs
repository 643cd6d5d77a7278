//! For each fault that keeps a pod out of the mesh: the answers of the plugin, `inpod explain` and `inpod pods`.

use std::{
    fs,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::ensure;
use inpod_proto::podevents::v1::Condition;
use integration::{Call, Node, Pod, SERVICES, Spec, TIMEOUT, Verbs, eventually, listen};
use nix::sys::signal::Signal;

use crate::netns::people::{asked, columns, explain::explained, output_of, refused};

const NOTHING_TO_DO: &str = "\nRemedy      Nothing to do";

/// Returns the last column of each pod that `inpod pods --unhealthy` lists.
fn unhealthy(node: &Node) -> Vec<String> {
    let lines = columns(&output_of(node, &["pods", "--unhealthy"]));
    let last = |line: &String| {
        line.split(' ')
            .nth(1)
            .zip(line.rsplit(' ').next())
            .map(|(name, reason)| format!("{name} {reason}"))
    };
    lines.iter().skip(1).filter_map(last).collect()
}

/// Prints the output that a fault leads to, which a failed test shows.
fn print(node: &Node, fault: &str, plugin: &str, pod: &str) {
    println!("== {fault}\nplugin: {plugin}");
    for arguments in [&["explain", pod][..], &["pods", "--unhealthy"], &["doctor"]] {
        let output = asked(node, arguments);
        let text = [output.stdout, output.stderr].concat();
        println!("-- {arguments:?}\n{}", String::from_utf8_lossy(&text));
    }
}

fn explain_until(node: &Node, pod: &str, parts: &[&str]) -> String {
    eventually(&format!("{pod} shows {parts:?}"), TIMEOUT, || {
        let text = explained(node, pod);
        let missing: Vec<_> = parts.iter().filter(|part| !text.contains(**part)).collect();
        ensure!(missing.is_empty(), "{missing:?} not in {text}");
        anyhow::Ok(text)
    })
    .unwrap()
}

fn start_add(node: &Node, pod: &Pod) -> integration::Running {
    node.call(Call::add, pod)
        .timeout_seconds(8)
        .start()
        .unwrap()
}

/// Asserts the answer of the plugin, and that the pod's failure lasts until its next ADD succeeds.
fn assert_refused(node: &Node, fault: &str, pod: &Pod, words: &str, reason: &str) {
    let name = &pod.spec.name;
    assert!(words.contains(&format!("[{reason}]")), "{words}");
    print(node, fault, words, &format!("shop/{name}"));
    let text = explained(node, name);
    let failure = text.split_once(&format!("\nFailure     {reason}: "));
    let message = failure.and_then(|(_, rest)| rest.split(['\n', '(']).next());
    let message = message.unwrap_or_default().trim();
    assert!(!message.is_empty() && words.contains(message), "{text}");
    assert!(!text.contains(NOTHING_TO_DO), "{text}");
    assert!(!text.contains("\nBypasses\n"), "it never ran: {text}");
    assert_eq!(unhealthy(node), [format!("{name} {reason}")]);
}

fn assert_enrolled(node: &Node, pod: &Pod) {
    node.add(pod).unwrap();
    let text = explained(node, &pod.spec.name);
    assert!(text.contains(NOTHING_TO_DO), "{text}");
    assert!(!text.contains("\nFailure"), "{text}");
    assert_eq!(unhealthy(node), [""; 0]);
}

fn until_served(node: &Node) {
    eventually("no pod is unhealthy", TIMEOUT, || {
        let unhealthy = unhealthy(node);
        ensure!(unhealthy.is_empty(), "{unhealthy:?}");
        anyhow::Ok(())
    })
    .unwrap();
}

#[test]
fn an_absent_ztunnel_is_named_while_an_add_waits_and_afterwards() {
    let node = Node::new().unwrap();
    let start = |service: &&str| node.start(service);
    SERVICES.iter().try_for_each(start).unwrap();
    eventually("the agent is ready", TIMEOUT, || {
        ensure!(node.api().status()?.ready, "it is not");
        anyhow::Ok(())
    })
    .unwrap();
    let pod = node.sandbox(Spec::new("a").ambient()).unwrap();
    let waiting = [
        "\nWaiting     for ztunnel since ",
        " (gives up in ",
        "\nRemedy      Check that ztunnel runs on this node",
    ];
    let add = start_add(&node, &pod);
    explain_until(&node, "a", &waiting);
    print(&node, "1: ztunnel is away, an ADD waits", "", "shop/a");
    let (_, words) = add.wait().unwrap().refusal().unwrap();
    let reason = "ZTUNNEL_NEVER_CONNECTED";
    assert_refused(&node, "1: ztunnel is away", &pod, &words, reason);
    let add = start_add(&node, &pod);
    let text = explain_until(&node, "a", &waiting);
    let cause = "cannot add the workload: no ztunnel has connected since";
    for earlier in [
        format!("Failure     {reason}: {cause}"),
        format!("failed: {cause}"),
    ] {
        assert!(text.contains(&earlier), "{earlier}: {text}");
    }
    assert_eq!(unhealthy(&node), [format!("a {reason}")]);
    add.wait().unwrap().refusal().unwrap();
    node.start_ztunnel(&[]).unwrap();
    node.ready().unwrap();
    assert_enrolled(&node, &pod);
    node.stop("ztunnel", Signal::SIGKILL).unwrap();
    let text = explain_until(
        &node,
        "a",
        &["\nRemedy      Check that ztunnel runs on this node"],
    );
    assert!(text.contains("\nState       enrolled"), "{text}");
    explain_until(&node, "a", &["\nFailure     ZTUNNEL_LOST: "]);
    print(&node, "1: ztunnel is away, the pod runs", "", "shop/a");
    assert_eq!(unhealthy(&node), ["a ZTUNNEL_LOST"]);
    node.start_ztunnel(&[]).unwrap();
    until_served(&node);
}

#[test]
fn absent_netconfig_is_named_while_an_add_waits_and_afterwards() {
    let node = Node::running().unwrap();
    let pod = node.sandbox(Spec::new("a").ambient()).unwrap();
    node.stop("netconfig", Signal::SIGKILL).unwrap();
    eventually("pod-events misses netconfig", TIMEOUT, || {
        let conditions = node.api().status()?.conditions;
        let is_missed = |it: &Condition| it.message.starts_with("netconfig is unavailable or");
        ensure!(conditions.iter().any(is_missed), "{conditions:?}");
        anyhow::Ok(())
    })
    .unwrap();
    let add = start_add(&node, &pod);
    explain_until(
        &node,
        "a",
        &[
            "\nWaiting     for netconfig since ",
            "\nRemedy      Check that the named service runs",
        ],
    );
    print(&node, "2: netconfig is away, an ADD waits", "", "shop/a");
    let (_, words) = add.wait().unwrap().refusal().unwrap();
    assert!(words.contains("netconfig"), "{words}");
    let reason = "DEPENDENCY_UNAVAILABLE";
    assert_refused(&node, "2: netconfig is away", &pod, &words, reason);
    node.start("netconfig").unwrap();
    node.ready().unwrap();
    assert_enrolled(&node, &pod);
}

/// pod-events never learns of such an ADD.
#[test]
fn a_wrong_agent_socket_is_named_by_the_plugin() {
    let node = Node::running().unwrap();
    let pod = node.sandbox(Spec::new("a").ambient()).unwrap();
    node.until_known(&pod.spec).unwrap();
    let call = node.call(Call::add, &pod).timeout_seconds(3);
    let call = call.with_key("agentSocket", "/run/nobody.sock");
    let (_, words) = call.run().unwrap().refusal().unwrap();
    for part in [
        "/run/nobody.sock",
        "[AGENT_UNAVAILABLE]",
        "the plugin's setting agentSocket",
    ] {
        assert!(words.contains(part), "{part}: {words}");
    }
    print(&node, "7: wrong agentSocket", &words, "shop/a");
    let text = explained(&node, "a");
    assert!(
        text.contains("\nRemedy      Wait for the pod's CNI ADD. "),
        "{text}"
    );
    assert!(!text.contains("\nBypasses\n"), "it never ran: {text}");
}

#[test]
fn an_unreadable_manifest_is_named_with_its_error() {
    let node = Node::running().unwrap();
    let pod = node.sandbox(Spec::new("a").ambient()).unwrap();
    let file = node.manifests().join("bad.yaml");
    fs::write(&file, "kind: Pod\nmetadata: [").unwrap();
    let named = "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=bad";
    let call = node.call(Call::add, &pod).with_var("CNI_ARGS", named);
    let (code, words) = call.run().unwrap().refusal().unwrap();
    assert_eq!(code, 100, "{words}");
    let (exit, said) = refused(&node, &["explain", "shop/bad"]);
    assert_eq!(exit, 1);
    print(&node, "8: unreadable manifest", &words, "shop/bad");
    let unusable = format!("{} cannot be used: invalid YAML: ", file.display());
    assert!(!words.contains('\n'), "{words}");
    for part in [&unusable, "[POD_UNKNOWN]", "Correct the manifest"] {
        assert!(words.contains(part), "{part}: {words}");
        assert!(said.contains(part), "{part}: {said}");
    }
    assert_enrolled(&node, &pod);
}

#[test]
fn a_taken_port_is_named_by_ztunnels_error() {
    let node = Node::running().unwrap();
    let pod = node.sandbox(Spec::new("a").ambient()).unwrap();
    let taken = pod.netns.within(|| listen(15001)).unwrap().unwrap();
    let (_, words) = start_add(&node, &pod).wait().unwrap().refusal().unwrap();
    assert!(words.contains("15001"), "{words}");
    assert_refused(
        &node,
        "9: port 15001 is taken",
        &pod,
        &words,
        "ZTUNNEL_REFUSED",
    );
    drop(taken);
    assert_enrolled(&node, &pod);
}

#[test]
fn a_refusal_after_a_restart_of_ztunnel_is_a_failure() {
    let node = Node::running().unwrap();
    let pod = node.pod(Spec::new("a").ambient()).unwrap();
    node.pod(Spec::new("b").ambient()).unwrap();
    node.stop("ztunnel", Signal::SIGKILL).unwrap();
    let taken = pod.netns.within(|| listen(15008)).unwrap().unwrap();
    node.start_ztunnel(&[]).unwrap();
    let failure = "\nFailure     ZTUNNEL_REFUSED: ztunnel refused the pod: failure to start proxy";
    let text = explain_until(&node, "a", &[failure, "\nState       enrolled"]);
    print(&node, "12: ztunnel refuses an enrolled pod", "", "shop/a");
    assert!(!text.contains(NOTHING_TO_DO), "{text}");
    assert_eq!(unhealthy(&node), ["a ZTUNNEL_REFUSED"]);
    let status = output_of(&node, &["status"]);
    assert!(
        status.contains("no ztunnel serves 1 of 2 pods: ztunnel refused the pod"),
        "{status}"
    );
    let socket = inpod_service::socket(&node.run_dir(), "pod-events");
    let metrics = Verbs::at(&socket).unwrap().metrics(&socket).unwrap();
    let failing = r#"inpod_pod_events_pods_failing{reason="ZTUNNEL_REFUSED"} 1"#;
    assert!(metrics.contains(failing), "{metrics}");
    drop(taken);
    until_served(&node);
    assert!(explained(&node, "a").contains("served by ztunnel again"));
}

#[test]
fn contested_rules_are_explained_with_their_differences() {
    let node = Node::running().unwrap();
    let pod = node.pod(Spec::new("a").ambient()).unwrap();
    let fights = AtomicBool::new(true);
    thread::scope(|scope| {
        scope.spawn(|| {
            while fights.load(Ordering::Relaxed) {
                pod.exec(&["nft", "flush", "ruleset"]).unwrap();
                thread::sleep(Duration::from_millis(20));
            }
        });
        let contested = eventually("the rules are contested", TIMEOUT, || {
            let text = explained(&node, "a");
            ensure!(text.contains("\nFailure     RULES_CONTESTED: "), "{text}");
            ensure!(text.contains("\n  pending transaction:\n"), "{text}");
            ensure!(
                text.contains(": verify its rules and repair them\n"),
                "{text}"
            );
            anyhow::Ok(text)
        });
        print(&node, "10: rules are contested", "", "shop/a");
        let listed = unhealthy(&node);
        // The other agent stops in any case.
        fights.store(false, Ordering::Relaxed);
        let text = contested.unwrap();
        assert!(
            text.contains("\nRemedy      Find the agent that changes rules"),
            "{text}"
        );
        assert_eq!(listed, ["a RULES_CONTESTED"]);
    });
}

#[test]
fn a_claimed_netns_is_refused_until_the_pod_is_enrolled() {
    let node = Node::running().unwrap();
    let other = node.pod(Spec::new("b").ambient()).unwrap();
    let pod = node.sandbox(Spec::new("a").ambient()).unwrap();
    let call = node.call(Call::add, &pod).without_key("prevResult");
    let call = call.with_var("CNI_NETNS", &other.path().display().to_string());
    let (_, words) = call.run().unwrap().refusal().unwrap();
    assert_refused(&node, "11: netns in use", &pod, &words, "NETNS_IN_USE");
    assert_enrolled(&node, &pod);
}
