//! The sockets, called as an operator would.

use std::path::PathBuf;

use inpod_proto::{
    failure_of,
    netconfig::v1::{InspectNetnsRequest, inspect_netns_request::Target},
    types::v1::NetnsRef,
};
use inpod_types::Reason;
use integration::{Node, SERVICES, Spec, TIMEOUT, call, eventually, health, refusal, run};
use tonic::Code;
use tonic_health::pb::health_check_response::ServingStatus;

const OWN: [&str; 3] = [
    "inpod.netconfig.v1.NetconfigService",
    "inpod.ztunnelbroker.v1.ZtunnelBrokerService",
    "inpod.podevents.v1.PodEventsService",
];

/// `integration/test` builds grpcurl for the full run.
#[test]
#[expect(clippy::disallowed_methods, reason = "integration/test names grpcurl")]
fn grpcurl_lists_and_describes_every_service_by_reflection() {
    let program = std::env::var("GRPCURL").unwrap();
    let node = Node::running().unwrap();
    for (service, name) in SERVICES.iter().zip(OWN) {
        let socket = inpod_service::socket(&node.run_dir(), service);
        let socket = socket.to_str().unwrap();
        let grpcurl = |rest: &[&str]| {
            let flags = ["-plaintext", "-unix", "-authority", "localhost", socket];
            run(&program, &[&flags, rest].concat()).unwrap()
        };
        let list = grpcurl(&["list"]);
        let listed: Vec<_> = list.lines().collect();
        let others = [
            "grpc.health.v1.Health",
            "grpc.reflection.v1.ServerReflection",
            "grpc.reflection.v1alpha.ServerReflection",
        ];
        for name in others.into_iter().chain([name]) {
            assert!(listed.contains(&name), "{name} is not in {list}");
        }
        let described = grpcurl(&["describe", name]);
        assert!(described.contains("rpc "), "{described}");
        assert!(
            !OWN.iter()
                .any(|other| *other != name && list.contains(other)),
            "{service} lists another's calls"
        );
    }
}

#[test]
fn health_is_served_for_the_process_and_for_its_calls() {
    let node = Node::running().unwrap();
    for (service, own) in SERVICES.iter().zip(OWN) {
        let socket = inpod_service::socket(&node.run_dir(), service);
        for name in ["", own] {
            let reported = health(&socket, name).unwrap();
            assert_eq!(reported, ServingStatus::Serving, "{service} {name}");
        }
    }
}

#[test]
fn a_failure_shows_its_reason_its_field_and_what_to_do_in_the_details() {
    let node = Node::running().unwrap();
    let failure = |namespace, name| {
        let error = node.api().explain(namespace, name).unwrap_err();
        let status = error.downcast::<tonic::Status>().unwrap();
        let failure = failure_of(&status);
        (status.code(), failure.reason, failure.field, status)
    };
    let (code, reason, _, status) = failure("shop", "nobody");
    assert_eq!((code, reason), (Code::NotFound, Reason::PodUnknown));
    // The remedy is text of the details, for clients that do not know the reason.
    let details = String::from_utf8_lossy(status.details()).into_owned();
    assert!(details.contains(reason.remedy()), "{details}");
    let (code, reason, field, _) = failure("Shop!", "a");
    assert_eq!(
        (code, reason),
        (Code::InvalidArgument, Reason::InvalidField)
    );
    assert_eq!(field, "pod.namespace");
}

#[test]
fn every_service_prints_its_configuration_and_checks_its_own_health() {
    let node = Node::running().unwrap();
    node.pod(Spec::new("a").ambient()).unwrap();
    for service in SERVICES {
        let program = integration::bin(service).unwrap();
        let program = program.to_str().unwrap();
        let run_dir = node.run_dir().display().to_string();
        let mut arguments = vec!["--run-dir", &run_dir, "--peer", "uid"];
        if service == "pod-events" {
            arguments.extend(["--node-name", "n", "--pods-from", "dir:/"]);
        }
        let printed = run(program, &[&arguments[..], &["--print-config"]].concat()).unwrap();
        assert!(
            printed.contains(&format!("run_dir = \"{run_dir}\" # command line")),
            "{printed}"
        );
        run(program, &[&arguments[..], &["--check"]].concat()).unwrap();
        arguments[1] = "/run/nowhere";
        let error = run(program, &[&arguments[..], &["--check"]].concat())
            .unwrap_err()
            .to_string();
        assert!(error.contains("/run/nowhere"), "{error}");
        let error = run(program, &["--run-dirr", "x"]).unwrap_err().to_string();
        assert!(error.contains("--run-dirr"), "{error}");
    }
}

#[test]
fn a_second_instance_of_a_service_refuses_to_take_over_a_served_socket() {
    let node = Node::running().unwrap();
    let program = integration::bin("netconfig").unwrap();
    let run_dir = node.run_dir().display().to_string();
    let error = run(
        program.to_str().unwrap(),
        &["--run-dir", &run_dir, "--peer", "uid"],
    )
    .unwrap_err()
    .to_string();
    assert!(error.contains("already served"), "{error}");
    node.ready().unwrap();
}

/// A node with one service, for which every process of the host is a stranger.
fn serving_strangers(service: &str) -> (Node, PathBuf) {
    let node = Node::new().unwrap();
    node.start_for("cgroup:/a/place/where/nobody/is", service)
        .unwrap();
    let socket = inpod_service::socket(&node.run_dir(), service);
    eventually("it serves", TIMEOUT, || health(&socket, "live")).unwrap();
    (node, socket)
}

#[test]
fn a_host_process_may_read_and_may_not_change() {
    for (service, package, changing, reading) in [
        (
            "netconfig",
            "inpod.netconfig.v1.NetconfigService",
            ["ClaimNetns", "ApplyRules"],
            "ListClaims",
        ),
        (
            "ztunnel-broker",
            "inpod.ztunnelbroker.v1.ZtunnelBrokerService",
            ["SetWorkloads", "RemoveWorkload"],
            "ListWorkloads",
        ),
    ] {
        let (_node, socket) = serving_strangers(service);
        for method in changing {
            let refused = refusal(&socket, &format!("/{package}/{method}")).unwrap();
            assert_eq!(refused.reason, Reason::CallerRefused, "{method}");
        }
        call(&socket, &format!("/{package}/{reading}"), ()).unwrap();
    }
}

#[test]
fn a_path_may_be_inspected_by_a_service_alone() {
    let (node, socket) = serving_strangers("netconfig");
    let netns = NetnsRef {
        path: node.netns().path().display().to_string(),
        ..NetnsRef::default()
    };
    let request = InspectNetnsRequest {
        target: Some(Target::Netns(netns)),
        ..InspectNetnsRequest::default()
    };
    let method = "/inpod.netconfig.v1.NetconfigService/InspectNetns";
    let refused = call(&socket, method, request).unwrap_err();
    assert_eq!(failure_of(&refused).reason, Reason::CallerRefused);
}

#[test]
fn where_services_are_known_by_their_cgroup_a_pod_joins_all_the_same() {
    let node = Node::new().unwrap();
    // Every process is at or below the root, so this shows only that cgroups are read and matched correctly.
    SERVICES
        .iter()
        .for_each(|service| node.start_for("cgroup:/", service).unwrap());
    node.start_ztunnel(&[]).unwrap();
    node.ready().unwrap();
    let pod = node.pod(Spec::new("a").ambient()).unwrap();
    node.until_whole(&pod.spec).unwrap();
}

#[test]
fn outside_of_a_pod_the_policy_pod_is_refused_with_what_to_set() {
    let program = integration::bin("netconfig").unwrap();
    let error = run(program.to_str().unwrap(), &["--run-dir", "/run/x"])
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("setting peer = pod") && error.contains("cgroup:PATH"),
        "{error}"
    );
}
