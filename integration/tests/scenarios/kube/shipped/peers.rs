//! A process that is no part of inpod is refused at each socket, by its cgroup.

use std::{io::Read as _, os::unix::net::UnixStream, path::Path, time::Duration};

use inpod_proto::{Class, class_of};
use integration::{SERVICES, ZTUNNEL_CAPABILITIES, bin, methods, run};

use super::*;

/// The UID of a pod that is not inpod's and no ztunnel.
const STRANGER: &str = "66666666-7777-8888-9999-aaaaaaaaaaaa";

/// Returns the HTTP status with which a socket answers a call of a program that `within` executes.
fn status(within: &[String], socket: &Path, call: &str) -> String {
    let url = format!("http://localhost{call}");
    let socket = socket.display().to_string();
    let curl = [
        "curl",
        "-s",
        "-o",
        "/dev/null",
        "--max-time",
        "5",
        "--http2-prior-knowledge",
        "--unix-socket",
        &socket,
        "-X",
        "POST",
        "-w",
        "%{http_code}",
        &url,
    ];
    let command: Vec<_> = within.iter().map(String::as_str).chain(curl).collect();
    // A call that is allowed may end with an error of its own.
    let script = ["-c", "\"$@\" || true", "sh"];
    run("sh", &[&script[..], &command].concat()).unwrap()
}

#[test]
fn a_stranger_is_refused_every_call_and_a_process_of_the_host_every_call_between_services() {
    let deployed = running();
    let stranger = deployed.cgroups.container(STRANGER, "", "+all").unwrap();
    for service in SERVICES {
        let socket = inpod_service::socket(&deployed.node.run_dir(), service);
        for call in methods(service) {
            assert_eq!(status(&stranger, &socket, &call), "403", "{call}");
            let found = status(&[], &socket, &call);
            let is_refused = class_of(&call) == Some(Class::Service);
            assert_eq!(found == "403", is_refused, "{call} by the host: {found}");
            assert_ne!(found, "000", "{call}");
        }
    }
}

#[test]
fn a_stranger_is_given_no_descriptor_at_either_socket_that_passes_them() {
    let deployed = running();
    let _pods = start(&deployed, [Mesh::Inside]);
    let mut stream = UnixStream::connect(deployed.node.run_dir().join("netns/netns.sock")).unwrap();
    let patience = Some(Duration::from_secs(5));
    stream.set_read_timeout(patience).unwrap();
    assert_eq!(stream.read(&mut [0; 8]).unwrap(), 0);
    let log = deployed.node.tail("netconfig", 1000);
    assert!(log.contains("Refused a connection on netns.sock"), "{log}");

    let socket = deployed.node.zds_socket().display().to_string();
    let impostor = bin("impostor").unwrap().display().to_string();
    let as_ztunnel = deployed
        .cgroups
        .container(STRANGER, "", ZTUNNEL_CAPABILITIES);
    for within in [vec!["env".to_owned()], as_ztunnel.unwrap()] {
        let arguments = [impostor.as_str(), "wait", &socket];
        let arguments = within[1..].iter().map(String::as_str).chain(arguments);
        let said = run(&within[0], &arguments.collect::<Vec<_>>()).unwrap();
        assert_eq!(said, "connected\nend\n", "{within:?}");
    }
    let log = deployed.node.tail("ztunnel-broker", 1000);
    let refused = log.matches("Refused a connection to ZDS").count();
    assert_eq!(refused, 2, "{log}");
}
