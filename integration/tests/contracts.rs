//! The sockets, called by grpcurl as an operator would.
#![expect(clippy::unwrap_used, reason = "a test that fails panics")]

use std::path::Path;

use integration::{Node, SERVICES, Spec, grpcurl_program, run};

fn grpcurl(socket: &Path, rest: &[&str]) -> anyhow::Result<String> {
    let socket = socket.to_str().unwrap();
    let data = rest.iter().position(|word| word.contains('{'));
    let (flags, call) = rest.split_at(data.map_or(0, |data| data + 1));
    let arguments = [
        &["-plaintext", "-unix", "-authority", "localhost"],
        flags,
        &[socket],
        call,
    ]
    .concat();
    run(&grpcurl_program()?, &arguments)
}

#[test]
fn grpcurl_lists_and_describes_every_service_by_reflection() {
    let node = Node::running().unwrap();
    let own = [
        "inpod.netconfig.v1.NetconfigService",
        "inpod.ztunnelbroker.v1.ZtunnelBrokerService",
        "inpod.podevents.v1.PodEventsService",
    ];
    for (service, name) in SERVICES.iter().zip(own) {
        let socket = inpod_service::socket(&node.run_dir(), service);
        let list = grpcurl(&socket, &["list"]).unwrap();
        let listed: Vec<_> = list.lines().collect();
        assert!(
            listed.contains(&name) && listed.contains(&"grpc.health.v1.Health"),
            "{list}"
        );
        assert!(
            listed.contains(&"grpc.reflection.v1.ServerReflection"),
            "{list}"
        );
        assert!(
            listed.contains(&"grpc.reflection.v1alpha.ServerReflection"),
            "{list}"
        );
        let described = grpcurl(&socket, &["describe", name]).unwrap();
        assert!(described.contains("rpc "), "{described}");
        assert!(
            !own.iter()
                .any(|other| *other != name && list.contains(other)),
            "{service} lists another's calls"
        );
    }
}

#[test]
fn health_is_served_for_the_process_and_for_its_calls() {
    let node = Node::running().unwrap();
    for service in SERVICES {
        let socket = inpod_service::socket(&node.run_dir(), service);
        let health = grpcurl(&socket, &["-d", "{}", "grpc.health.v1.Health/Check"]).unwrap();
        assert!(health.contains("\"SERVING\""), "{health}");
    }
    let socket = inpod_service::socket(&node.run_dir(), "netconfig");
    let own = r#"{"service":"inpod.netconfig.v1.NetconfigService"}"#;
    let health = grpcurl(&socket, &["-d", own, "grpc.health.v1.Health/Check"]).unwrap();
    assert!(health.contains("\"SERVING\""), "{health}");
}

#[test]
fn a_failure_shows_its_reason_its_field_and_what_to_do_in_the_details() {
    let node = Node::running().unwrap();
    let socket = inpod_service::socket(&node.run_dir(), "pod-events");
    let call = "inpod.podevents.v1.PodEventsService/ExplainPod";
    let unknown = grpcurl(
        &socket,
        &[
            "-d",
            r#"{"pod":{"namespace":"shop","name":"nobody"}}"#,
            call,
        ],
    )
    .unwrap_err()
    .to_string();
    assert!(
        unknown.contains("NotFound") && unknown.contains("REASON_POD_UNKNOWN"),
        "{unknown}"
    );
    let invalid = grpcurl(
        &socket,
        &["-d", r#"{"pod":{"namespace":"Shop!","name":"a"}}"#, call],
    )
    .unwrap_err()
    .to_string();
    assert!(
        invalid.contains("InvalidArgument") && invalid.contains("pod.namespace"),
        "{invalid}"
    );
    assert!(invalid.contains("remedy"), "{invalid}");
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

/// Asks as a host process that is no service.
fn asked_by_a_host_process(service: &str, call: &str) -> anyhow::Result<String> {
    let node = Node::new()?;
    node.start_for("cgroup:/a/place/where/nobody/is", service)?;
    let socket = inpod_service::socket(&node.run_dir(), service);
    integration::eventually("it serves", integration::TIMEOUT, || {
        grpcurl(&socket, &["list"])
    })?;
    grpcurl(&socket, &["-d", "{}", call])
}

#[test]
fn a_host_process_may_read_and_may_not_change() {
    let changing = [
        (
            "netconfig",
            "inpod.netconfig.v1.NetconfigService/ClaimNetns",
        ),
        (
            "netconfig",
            "inpod.netconfig.v1.NetconfigService/ApplyRules",
        ),
        (
            "ztunnel-broker",
            "inpod.ztunnelbroker.v1.ZtunnelBrokerService/SetWorkloads",
        ),
        (
            "ztunnel-broker",
            "inpod.ztunnelbroker.v1.ZtunnelBrokerService/RemoveWorkload",
        ),
    ];
    for (service, call) in changing {
        let refused = asked_by_a_host_process(service, call)
            .unwrap_err()
            .to_string();
        assert!(
            refused.contains("PermissionDenied") && refused.contains("REASON_CALLER_REFUSED"),
            "{call}: {refused}"
        );
    }
    asked_by_a_host_process(
        "netconfig",
        "inpod.netconfig.v1.NetconfigService/ListClaims",
    )
    .unwrap();
    asked_by_a_host_process(
        "ztunnel-broker",
        "inpod.ztunnelbroker.v1.ZtunnelBrokerService/ListWorkloads",
    )
    .unwrap();
}

#[test]
fn a_path_may_be_inspected_by_a_service_alone() {
    let node = Node::new().unwrap();
    node.start_for("cgroup:/a/place/where/nobody/is", "netconfig")
        .unwrap();
    let socket = inpod_service::socket(&node.run_dir(), "netconfig");
    integration::eventually("it serves", integration::TIMEOUT, || {
        grpcurl(&socket, &["list"])
    })
    .unwrap();
    let path = format!(
        r#"{{"netns":{{"path":"{}"}}}}"#,
        node.netns().path().display()
    );
    let call = "inpod.netconfig.v1.NetconfigService/InspectNetns";
    let refused = grpcurl(&socket, &["-d", &path, call])
        .unwrap_err()
        .to_string();
    assert!(refused.contains("REASON_CALLER_REFUSED"), "{refused}");
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
