use std::{fs, os::unix::fs::MetadataExt as _};

use inpod_proto::{
    into_status,
    podevents::v1::AddPodRequest,
    types::v1::{NetnsRef, PodSelector, SandboxRef},
};
use inpod_types::{Failure, Reason};
use serde_json::{Value, json};
use tonic::Status;

use crate::{
    fake_agent::{FakeAgent, Question, Script},
    node::{Node, TIMEOUT},
    recorded::{self, LEGACY, Recorded},
};

fn containerds_add() -> Recorded {
    Recorded::number("04")
}

fn legacy_add(version: &str, keys: &str) -> Recorded {
    containerds_add().with_configuration(version, keys)
}

/// Returns the request that a recorded ADD leads to.
fn expected(call: &Recorded, node: &Node) -> AddPodRequest {
    let netns = fs::metadata(node.netns()).unwrap();
    let prev_result: Value = serde_json::from_str(&call.key("prevResult").unwrap()).unwrap();
    let ips = prev_result["ips"].as_array().unwrap();
    let bare = |ip: &Value| {
        ip["address"]
            .as_str()
            .unwrap()
            .split('/')
            .next()
            .unwrap()
            .to_owned()
    };
    AddPodRequest {
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
        netns: Some(NetnsRef {
            path: node.netns().to_str().unwrap().to_owned(),
            device: Some(netns.dev()),
            inode: Some(netns.ino()),
            cookie: None,
        }),
        addresses: ips.iter().map(bare).collect(),
    }
}

#[test]
fn every_recorded_add_reaches_the_agent_and_prints_its_prev_result_byte_for_byte() {
    for call in recorded::of_verb("ADD") {
        let node = Node::new();
        let agent = FakeAgent::on(&node, Script::Accept);
        node.run(&call).printed(&call.key("prevResult").unwrap());
        let questions = if call.is_for_a_pod() {
            vec![Question::Add(expected(&call, &node))]
        } else {
            vec![]
        };
        assert_eq!(agent.questions(), questions, "{}", call.name);
    }
}

#[test]
fn the_deadline_and_the_trace_travel_as_metadata() {
    let node = Node::new().with(r#""timeoutSeconds":7"#);
    let agent = FakeAgent::on(&node, Script::Accept);
    let run = node.run(&containerds_add());
    let (_, metadata) = agent.only();
    let text = |key: &str| metadata.get(key).unwrap().to_str().unwrap().to_owned();
    let timeout = text("grpc-timeout");
    let micros: u64 = timeout.strip_suffix('u').unwrap().parse().unwrap();
    assert!((5_000_000..7_000_000).contains(&micros), "{timeout}");
    let trace_id = run.log()["trace_id"].as_str().unwrap().to_owned();
    assert!(text("traceparent").starts_with(&format!("00-{trace_id}-")));
}

#[test]
fn a_refusal_is_100_and_says_what_to_do() {
    let node = Node::new();
    let failure =
        Failure::new(Reason::PodUidMismatch, "shop/dual-0 now has another UID").at_field("pod.uid");
    let _agent = FakeAgent::on(&node, Script::Refuse(into_status(&failure)));
    let run = node.run(&containerds_add());
    assert_eq!(
        run.error(),
        json!({
            "cniVersion": "1.0.0",
            "code": 100,
            "msg": "inpod: shop/dual-0 now has another UID (field pod.uid)",
            "details": "Nothing to do: the sandbox belongs to an earlier pod of this name. [POD_UID_MISMATCH]",
        })
    );
    assert_eq!(run.log()["level"], "ERROR");
    assert!(node.spooled().is_empty());
}

#[test]
fn every_kind_of_refusal_maps_to_retry_or_refused() {
    for (status, code) in [
        (Status::invalid_argument("x"), 100),
        (Status::permission_denied("x"), 100),
        (Status::not_found("x"), 100),
        (Status::failed_precondition("x"), 100),
        (Status::internal("x"), 100),
        (Status::unimplemented("x"), 100),
        (Status::unavailable("x"), 11),
        (Status::deadline_exceeded("x"), 11),
        (Status::resource_exhausted("x"), 11),
        (Status::aborted("x"), 11),
        (Status::cancelled("x"), 11),
        (Status::unknown("x"), 11),
    ] {
        let node = Node::new();
        let _agent = FakeAgent::on(&node, Script::Refuse(status.clone()));
        assert_eq!(node.run(&containerds_add()).error_code(), code, "{status}");
    }
}

#[test]
fn an_agent_that_hangs_is_11_within_the_deadline() {
    let node = Node::new().with(r#""timeoutSeconds":1"#);
    let agent = FakeAgent::on(&node, Script::Hang);
    let run = node.run(&containerds_add());
    assert_eq!(run.error_code(), 11);
    assert!(
        run.error()["msg"]
            .as_str()
            .unwrap()
            .contains("did not answer within"),
        "{run:?}"
    );
    assert!(run.took < TIMEOUT, "{run:?}");
    assert_eq!(agent.questions().len(), 1);
}

#[test]
fn an_agent_that_dies_over_the_call_is_11_and_not_taken_for_one_that_is_away() {
    // Without the agent, a pod of this unenrolled namespace would be admitted.
    let node = Node::new().with_state("enrolled-namespaces", "");
    let _agent = FakeAgent::on(&node, Script::Die);
    let run = node.run(&containerds_add());
    assert_eq!(run.error_code(), 11);
    assert!(
        run.error()["msg"]
            .as_str()
            .unwrap()
            .contains("closed the connection"),
        "{run:?}"
    );
    assert!(node.spooled().is_empty());
}

#[test]
fn without_a_prev_result_an_empty_result_is_printed_and_no_address_sent() {
    let node = Node::new();
    let agent = FakeAgent::on(&node, Script::Accept);
    // The stdin of a DEL has no prevResult.
    let call = Recorded {
        stdin: Recorded::number("03").stdin,
        ..containerds_add()
    };
    node.run(&call)
        .printed(r#"{"cniVersion":"0.4.0","interfaces":[],"ips":[],"routes":[],"dns":{}}"#);
    let (Question::Add(question), _) = agent.only() else {
        panic!("another question");
    };
    assert!(question.addresses.is_empty());
}

#[test]
fn a_legacy_prev_result_passes_with_its_addresses_known() {
    for (version, result_version) in LEGACY {
        let prev_result = format!(
            r#"{{"cniVersion":"{result_version}","ip4":{{"ip":"10.88.0.2/16","gateway":"10.88.0.1"}},"ip6":{{"ip":"fd77::2/64"}},"dns":{{}}}}"#
        );
        let call = legacy_add(version, &format!(r#","prevResult":{prev_result}"#));
        let node = Node::new();
        let agent = FakeAgent::on(&node, Script::Accept);
        node.run(&call).printed(&prev_result);
        let (Question::Add(question), _) = agent.only() else {
            panic!("another question");
        };
        assert_eq!(question.addresses, ["10.88.0.2", "fd77::2"], "{version}");
    }
}

#[test]
fn a_legacy_add_without_prev_result_prints_an_empty_result() {
    for (version, result_version) in LEGACY {
        let node = Node::new();
        let _agent = FakeAgent::on(&node, Script::Accept);
        let empty = format!(r#"{{"cniVersion":"{result_version}","dns":{{}}}}"#);
        node.run(&legacy_add(version, "")).printed(&empty);
    }
}

#[test]
fn an_error_of_a_legacy_call_has_the_version_of_the_call() {
    for (version, result_version) in LEGACY {
        let invalid = legacy_add(version, r#","prevResult":{"ip4":{"ip":"10.88.0/16"}}"#);
        for (call, code) in [
            (invalid, 7),
            (legacy_add(version, "").with_var("CNI_COMMAND", "CHECK"), 1),
            (legacy_add(version, "").without_var("CNI_NETNS"), 4),
        ] {
            let error = Node::new().run(&call).error();
            assert_eq!(
                (&error["code"], &error["cniVersion"]),
                (&code.into(), &result_version.into()),
                "{error}"
            );
        }
    }
}

#[test]
fn a_pod_of_an_excluded_namespace_passes_at_once_even_with_the_agent_away() {
    let node = Node::new().with(r#""excludeNamespaces":["kube-system","shop"]"#);
    let call = containerds_add();
    let run = node.run(&call);
    run.printed(&call.key("prevResult").unwrap());
    assert_eq!(run.log()["message"], "Skipped: excluded namespace");
    assert!(node.spooled().is_empty());
}

#[test]
fn a_netns_in_proc_is_looked_at_through_its_link() {
    let node = Node::new();
    let agent = FakeAgent::on(&node, Script::Accept);
    // The plugin shares the netns of this test.
    let own = fs::metadata("/proc/self/ns/net").unwrap();
    let call = containerds_add().with_var("CNI_NETNS", "/proc/self/ns/net");
    assert_eq!(node.run(&call).code, Some(0));
    let (Question::Add(question), _) = agent.only() else {
        panic!("another question");
    };
    let netns = question.netns.unwrap();
    assert_eq!(
        (netns.device, netns.inode),
        (Some(own.dev()), Some(own.ino()))
    );
}

#[test]
fn a_netns_that_is_not_there_is_error_4_and_the_agent_is_not_asked() {
    let node = Node::new();
    let agent = FakeAgent::on(&node, Script::Accept);
    let call = containerds_add().with_var("CNI_NETNS", "/proc/1/ns/none");
    let run = node.run(&call);
    assert_eq!(run.error_code(), 4);
    assert!(
        run.error()["msg"]
            .as_str()
            .unwrap()
            .contains("/proc/1/ns/none")
    );
    assert!(agent.questions().is_empty());
}

#[test]
fn no_variable_but_cnis_has_any_influence() {
    let node = Node::new();
    let agent = FakeAgent::on(&node, Script::Accept);
    let mut call = containerds_add();
    for name in [
        "http_proxy",
        "HTTP_PROXY",
        "ALL_PROXY",
        "grpc_proxy",
        "INPOD_RUN_DIR",
        "RUST_LOG",
        "TMPDIR",
    ] {
        call = call.with_var(name, "http://127.0.0.1:1");
    }
    node.run(&call).printed(&call.key("prevResult").unwrap());
    assert_eq!(agent.questions().len(), 1);
}
