use inpod_cni::spool::{Cause, SpooledVerb};
use inpod_proto::{
    podevents::v1::DeletePodRequest,
    types::v1::{PodSelector, SandboxRef},
};
use tonic::Status;

use crate::{
    fake_agent::{FakeAgent, Question, Script},
    node::{Node, TIMEOUT},
    recorded::{self, LEGACY, Recorded},
};

fn containerds_del() -> Recorded {
    Recorded::number("05")
}

fn expected(call: &Recorded) -> Question {
    Question::Delete(DeletePodRequest {
        sandbox: Some(SandboxRef {
            network_name: "feasnet".to_owned(),
            container_id: call.var("CNI_CONTAINERID").to_owned(),
            ifname: "eth0".to_owned(),
        }),
        pod: Some(PodSelector {
            namespace: call.arg("K8S_POD_NAMESPACE").to_owned(),
            name: call.arg("K8S_POD_NAME").to_owned(),
            uid: call.arg("K8S_POD_UID").to_owned(),
        }),
    })
}

#[test]
fn every_recorded_del_reaches_the_agent_with_or_without_netns_and_prev_result() {
    for call in recorded::of_verb("DEL") {
        let node = Node::new();
        let agent = FakeAgent::on(&node, Script::Accept);
        node.run(&call).printed("");
        let questions = if call.is_for_a_pod() {
            vec![expected(&call)]
        } else {
            vec![]
        };
        assert_eq!(agent.questions(), questions, "{}", call.name);
        assert!(node.spooled().is_empty(), "{}", call.name);
    }
}

#[test]
fn a_del_of_a_legacy_version_reaches_the_agent() {
    for (version, _) in LEGACY {
        let call = containerds_del().with_configuration(version, "");
        let node = Node::new();
        let agent = FakeAgent::on(&node, Script::Accept);
        node.run(&call).printed("");
        assert_eq!(agent.questions(), [expected(&call)], "{version}");
    }
}

#[test]
fn every_recorded_del_is_written_down_while_the_agent_is_away() {
    for call in recorded::of_verb("DEL") {
        let node = Node::new();
        node.run(&call).printed("");
        let spooled = node.spooled();
        assert_eq!(
            spooled.len(),
            usize::from(call.is_for_a_pod()),
            "{}",
            call.name
        );
        for entry in spooled {
            assert_eq!(
                (entry.verb, entry.cause),
                (SpooledVerb::Del, Cause::AgentAway)
            );
            assert_eq!(
                entry.sandbox.container_id.as_str(),
                call.var("CNI_CONTAINERID")
            );
            assert_eq!(entry.pod.unwrap().name.as_str(), call.arg("K8S_POD_NAME"));
            assert_eq!(entry.netns.is_some(), !call.var("CNI_NETNS").is_empty());
        }
    }
}

#[test]
fn both_dels_of_a_pod_are_written_down_in_order() {
    let node = Node::new();
    for number in ["02", "03"] {
        node.run(&Recorded::number(number)).printed("");
    }
    let has_netns: Vec<bool> = node
        .spooled()
        .iter()
        .map(|entry| entry.netns.is_some())
        .collect();
    assert_eq!(has_netns, [true, false]);
}

#[test]
fn a_del_that_the_agent_answers_with_an_error_is_written_down() {
    for status in [
        Status::unavailable("x"),
        Status::internal("x"),
        Status::permission_denied("x"),
    ] {
        let node = Node::new();
        let _agent = FakeAgent::on(&node, Script::Refuse(status));
        let run = node.run(&containerds_del());
        run.printed("");
        assert_eq!(node.spooled()[0].cause, Cause::AgentFailed);
        assert_eq!(run.log()["level"], "WARN");
    }
}

#[test]
fn a_del_does_not_wait_long_for_an_agent_that_hangs() {
    let node = Node::new();
    let _agent = FakeAgent::on(&node, Script::Hang);
    let run = node.run(&containerds_del());
    run.printed("");
    assert!(run.took < TIMEOUT, "{run:?}");
    assert_eq!(node.spooled()[0].cause, Cause::AgentFailed);
}

#[test]
fn a_del_whose_spool_cannot_be_written_still_succeeds_and_logs_an_error() {
    // A file in place of the directory.
    let node = Node::new().with_state("spool", "");
    let run = node.run(&containerds_del());
    run.printed("");
    assert_eq!(run.log()["level"], "ERROR");
    assert!(
        run.log()["error"].as_str().unwrap().contains("spool"),
        "{run:?}"
    );
}

#[test]
fn a_del_whose_pod_cannot_be_read_names_the_sandbox_alone() {
    let node = Node::new();
    let agent = FakeAgent::on(&node, Script::Accept);
    node.run(&containerds_del().with_var("CNI_ARGS", "nonsense"))
        .printed("");
    let (Question::Delete(question), _) = agent.only() else {
        panic!("another question");
    };
    assert_eq!(question.pod, None);
    assert!(question.sandbox.is_some());
}

#[test]
fn a_del_without_container_or_interface_is_error_4() {
    for name in ["CNI_CONTAINERID", "CNI_IFNAME"] {
        let run = Node::new().run(&containerds_del().without_var(name));
        assert_eq!(run.error_code(), 4);
        assert!(run.error()["msg"].as_str().unwrap().contains(name));
    }
}
