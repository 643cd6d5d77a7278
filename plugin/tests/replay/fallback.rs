use std::{fs, os::unix::net::UnixListener};

use inpod_cni::spool::{Cause, SpooledVerb};

use crate::{
    fake_agent::{FakeAgent, Script},
    node::Node,
    recorded::{self, Recorded},
};

fn containerds_add() -> Recorded {
    Recorded::number("04")
}

#[test]
fn every_recorded_add_waits_while_an_agent_that_never_ran_is_away() {
    for call in recorded::of_verb("ADD") {
        let node = Node::new();
        let run = node.run(&call);
        if call.is_for_a_pod() {
            assert_eq!(run.error_code(), 11, "{}", call.name);
            assert!(
                run.error()["details"]
                    .as_str()
                    .unwrap()
                    .contains("AGENT_UNAVAILABLE")
            );
        } else {
            run.printed(&call.key("prevResult").unwrap());
        }
        assert!(node.spooled().is_empty(), "{}", call.name);
    }
}

#[test]
fn a_socket_that_a_dead_agent_left_counts_as_unreachable() {
    let node = Node::new();
    drop(UnixListener::bind(node.socket()).unwrap());
    let run = node.run(&containerds_add());
    assert_eq!(run.error_code(), 11);
    assert!(
        run.error()["msg"].as_str().unwrap().contains("refused"),
        "{run:?}"
    );
}

#[test]
fn a_pod_of_an_enrolled_namespace_waits() {
    let node = Node::new().with_state("enrolled-namespaces", "bank\nshop\n");
    let run = node.run(&containerds_add());
    assert_eq!(run.error_code(), 11);
    assert!(
        run.error()["msg"]
            .as_str()
            .unwrap()
            .contains("namespace shop"),
        "{run:?}"
    );
    assert!(node.spooled().is_empty());
}

#[test]
fn a_pod_of_another_namespace_is_admitted_and_written_down() {
    let node = Node::new().with_state("enrolled-namespaces", "bank\n");
    let call = containerds_add();
    let run = node.run(&call);
    run.printed(&call.key("prevResult").unwrap());
    assert_eq!(run.log()["level"], "WARN");
    let [entry] = node.spooled().try_into().unwrap();
    assert_eq!(
        (entry.verb, entry.cause),
        (SpooledVerb::Add, Cause::AgentAway)
    );
    assert_eq!(
        entry.sandbox.container_id.as_str(),
        call.var("CNI_CONTAINERID")
    );
    let addresses: Vec<String> = entry.addresses.iter().map(ToString::to_string).collect();
    assert_eq!(addresses, ["10.244.77.3", "fd77::2"]);
    let netns = entry.netns.unwrap();
    assert_eq!(netns.path, node.netns());
    assert!(netns.device.is_some() && netns.inode.is_some());
    let pod = entry.pod.unwrap();
    assert_eq!(
        (pod.namespace.as_str(), pod.name.as_str()),
        ("shop", "dual-0")
    );
    assert_eq!(pod.uid.unwrap().as_str(), call.arg("K8S_POD_UID"));
}

#[test]
fn no_pod_is_admitted_that_cannot_be_written_down() {
    let node = Node::new()
        .with_state("enrolled-namespaces", "bank\n")
        .with_state("spool", "");
    let run = node.run(&containerds_add());
    assert_eq!(run.error_code(), 11);
    assert!(
        run.error()["msg"].as_str().unwrap().contains("spool"),
        "{run:?}"
    );
}

#[test]
fn a_node_that_prefers_starting_pods_admits_enrolled_ones_and_writes_them_down() {
    let node = Node::new()
        .with(r#""agentUnavailable":"allow""#)
        .with_state("enrolled-namespaces", "shop\n");
    let call = containerds_add();
    node.run(&call).printed(&call.key("prevResult").unwrap());
    assert_eq!(node.spooled().len(), 1);
}

#[test]
fn the_kill_switch_passes_every_call_through_loudly_without_the_agent() {
    let node = Node::new().with_state("disabled", "");
    let agent = FakeAgent::on(&node, Script::Hang);
    for (number, verb) in [
        ("04", Some(SpooledVerb::Add)),
        ("05", Some(SpooledVerb::Del)),
        ("24", None),
    ] {
        let call = Recorded::number(number);
        let run = node.run(&call);
        let stdout = if number == "04" {
            call.key("prevResult").unwrap()
        } else {
            String::new()
        };
        run.printed(&stdout);
        let last = node.spooled().pop().map(|entry| (entry.verb, entry.cause));
        if let Some(verb) = verb {
            assert_eq!(last, Some((verb, Cause::Disabled)), "{run:?}");
        }
    }
    assert!(agent.questions().is_empty());
    let run = node.run(&containerds_add());
    assert_eq!(run.log()["level"], "ERROR");
    assert!(run.log()["message"].as_str().unwrap().contains("disabled"));
}

#[test]
fn the_kill_switch_works_on_a_full_disk_and_without_a_netns() {
    let node = Node::new()
        .with_state("disabled", "")
        .with_state("spool", "");
    fs::remove_file(node.netns()).unwrap();
    let call = containerds_add();
    node.run(&call).printed(&call.key("prevResult").unwrap());
}
