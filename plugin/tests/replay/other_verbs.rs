use inpod_proto::{
    into_status,
    podevents::v1::{Attachment, CheckPodRequest, CollectGarbageRequest},
    types::v1::SandboxRef,
};
use inpod_types::{Failure, Reason};

use crate::{
    fake_agent::{FakeAgent, Question, Script},
    node::Node,
    recorded::Recorded,
};

/// A call of spec 1.1.0; no runtime made one to record.
fn call(verb: &str, keys: &str) -> Recorded {
    let stdin = format!(r#"{{"cniVersion":"1.1.0","name":"net","type":"inpod-cni"{keys}}}"#);
    Recorded {
        stdin,
        ..Recorded::number("24")
    }
    .with_var("CNI_COMMAND", verb)
}

#[test]
fn podmans_version_probe_is_answered_from_constants() {
    let call = Recorded::number("20");
    let run = Node::new().run_with(&call, call.stdin.as_bytes());
    run.printed(
        r#"{"cniVersion":"1.0.0","supportedVersions":["0.1.0","0.2.0","0.3.0","0.3.1","0.4.0","1.0.0","1.1.0"]}"#,
    );
}

#[test]
fn version_needs_no_stdin() {
    let run = Node::new().run_with(&Recorded::number("20"), b"");
    run.printed(
        r#"{"cniVersion":"1.1.0","supportedVersions":["0.1.0","0.2.0","0.3.0","0.3.1","0.4.0","1.0.0","1.1.0"]}"#,
    );
}

#[test]
fn cnitools_check_reaches_the_agent_and_prints_nothing() {
    let node = Node::new();
    let agent = FakeAgent::on(&node, Script::Accept);
    node.run(&Recorded::number("24")).printed("");
    let sandbox = SandboxRef {
        network_name: "feasnet".into(),
        container_id: "cnitool-eb69d96616c204ff963c".into(),
        ifname: "eth0".into(),
    };
    let expected = Question::Check(CheckPodRequest {
        sandbox: Some(sandbox),
    });
    assert_eq!(agent.only().0, expected);
}

#[test]
fn a_check_that_finds_a_difference_is_100_and_one_without_the_agent_11() {
    let node = Node::new();
    assert_eq!(node.run(&Recorded::number("24")).error_code(), 11);
    let failure = Failure::new(Reason::RulesDiffer, "table inpod is gone");
    let _agent = FakeAgent::on(&node, Script::Refuse(into_status(&failure)));
    assert_eq!(node.run(&Recorded::number("24")).error_code(), 100);
}

#[test]
fn gc_hands_the_agent_every_attachment_of_the_networks_list() {
    let node = Node::new();
    let agent = FakeAgent::on(&node, Script::Accept);
    let listed = [("c1", "eth0"), ("c1", "net1"), ("c2", "eth0")];
    let keys =
        listed.map(|(id, ifname)| format!(r#"{{"containerID":"{id}","ifname":"{ifname}"}}"#));
    let keys = format!(r#","cni.dev/valid-attachments":[{}]"#, keys.join(","));
    node.run(&call("GC", &keys)).printed("");
    let attachment = |(id, ifname): (&str, &str)| Attachment {
        container_id: id.into(),
        ifname: ifname.into(),
    };
    let expected = Question::Collect(CollectGarbageRequest {
        network_name: "net".into(),
        valid_attachments: listed.map(attachment).to_vec(),
    });
    assert_eq!(agent.only().0, expected);
}

#[test]
fn gc_without_a_list_collects_nothing() {
    let node = Node::new();
    let agent = FakeAgent::on(&node, Script::Accept);
    assert_eq!(node.run(&call("GC", "")).error_code(), 7);
    assert!(agent.questions().is_empty());
}

#[test]
fn gc_without_the_agent_is_11() {
    let run = Node::new().run(&call("GC", r#","cni.dev/valid-attachments":[]"#));
    assert_eq!(run.error_code(), 11);
}

#[test]
fn status_does_not_depend_on_the_agent() {
    Node::new().run(&call("STATUS", "")).printed("");
}
