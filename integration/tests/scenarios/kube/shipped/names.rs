//! DNS of enrolled pods goes to ztunnel, that of others to their name server; names may be as long as Kubernetes allows.

use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, UdpSocket},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use integration::{App, Call};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::*;

const DNS: u16 = 53;

/// A query with an empty question section (RFC 1035, section 4.1.1).
const QUERY: [u8; 12] = [7, 7, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// A name server, which answers each query without an error.
struct Server(Arc<AtomicBool>);

impl Server {
    /// Binds one address: a reply from a wildcard socket would have another source.
    fn start(netns: &Netns, at: (IpAddr, u16)) -> Self {
        let socket = netns.within(|| UdpSocket::bind(at));
        let socket = socket.unwrap().unwrap();
        let poll = Some(Duration::from_millis(50));
        socket.set_read_timeout(poll).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        thread::spawn(move || {
            let mut answer = QUERY;
            answer[2] |= 0x80;
            while !stopped.load(Ordering::Relaxed) {
                if let Ok((_, client)) = socket.recv_from(&mut [0; 64]) {
                    socket.send_to(&answer, client).unwrap();
                }
            }
        });
        Self(stop)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Returns who has answered: the reference ztunnel answers with SERVFAIL.
fn answerer(answer: &[u8]) -> &'static str {
    match answer {
        [7, 7, 0x81, 2, ..] => "ztunnel",
        [7, 7, 0x81, 0, ..] => "the name server",
        _ => "somebody else",
    }
}

fn ask_by_udp(from: &Netns, server: IpAddr) -> anyhow::Result<&'static str> {
    let any = if server.is_ipv4() { "0.0.0.0" } else { "::" };
    let socket = from.within(|| UdpSocket::bind((any, 0)))??;
    socket.set_read_timeout(Some(Duration::from_secs(5)))?;
    socket.connect((server, DNS))?;
    socket.send(&QUERY)?;
    let mut answer = [0; 64];
    let length = socket.recv(&mut answer)?;
    Ok(answerer(&answer[..length]))
}

fn ask_by_tcp(from: &Netns, server: IpAddr) -> anyhow::Result<&'static str> {
    let mut stream = integration::connect(from, SocketAddr::new(server, DNS))?;
    stream.write_all(&[&[0, 12], &QUERY[..]].concat())?;
    let mut answer = [0; 14];
    stream.read_exact(&mut answer)?;
    Ok(answerer(&answer[2..]))
}

#[test]
fn dns_of_enrolled_pods_goes_to_ztunnel_and_that_of_other_pods_to_their_name_server() {
    let deployed = running();
    let all = [Mesh::Inside, Mesh::Inside, Mesh::Outside, Mesh::Outside];
    let [pod, exempt, outsider, resolver] = start(&deployed, all).map(|it| it.pod);
    let off = json!({"metadata": {"annotations": {"ambient.istio.io/dns-capture": "false"}}});
    let path = deployed.pod_path(&exempt.spec.name);
    deployed.server.patch(&path, &off).unwrap();
    let _servers = resolver
        .addresses()
        .map(|ip| Server::start(&resolver.netns, (ip, DNS)));
    for server in resolver.addresses() {
        assert_eq!(ask_by_udp(&pod.netns, server).unwrap(), "ztunnel");
        assert_eq!(ask_by_tcp(&pod.netns, server).unwrap(), "ztunnel");
        let answer = ask_by_udp(&outsider.netns, server).unwrap();
        assert_eq!(answer, "the name server");
        eventually("the annotation takes effect", TIMEOUT, || {
            let answer = ask_by_udp(&exempt.netns, server)?;
            ensure!(answer == "the name server", "{answer}");
            anyhow::Ok(())
        })
        .unwrap();
    }
}

/// A name of this length in labels of at most 63 characters.
fn name_of(length: usize, letter: char) -> String {
    let dots = (0..length).map(|at| if at % 64 == 63 { '.' } else { letter });
    dots.collect()
}

#[test]
fn pods_with_the_longest_names_in_the_longest_namespace_join_survive_a_restart_and_end() {
    let mut deployed = running();
    let namespace = name_of(63, 'n');
    deployed.use_namespace(&namespace).unwrap();
    let names = [name_of(253, 'p'), name_of(253, 'q')];
    let wanted = [(&names[0], Mesh::Inside), (&names[1], Mesh::Outside)];
    let wanted = wanted.map(|(name, mesh)| (Some(name.as_str()), mesh));
    let pods = deployed.named_sandboxes(&wanted).unwrap();
    for pod in &pods {
        deployed.add(pod).unwrap();
    }
    let processes = deployed.inhabitants(&pods).unwrap();
    let (inside, outside) = (&pods[0], &pods[1]);
    let _apps = [inside, outside].map(|pod| App::start(&pod.netns, PORT).unwrap());
    let works = || {
        deployed.node.until_whole(&inside.spec).unwrap();
        assert_path(&deployed, inside, outside, &[(inside, 15001)]);
        assert_path(&deployed, outside, inside, &[(inside, 15006)]);
        assert_eq!(outside.traces().unwrap(), NOTHING);
    };
    works();
    eventually("the pod is annotated", TIMEOUT, || {
        let object = deployed.server.get(&deployed.pod_path(&names[0]))?;
        let found = object.pointer("/metadata/annotations/ambient.istio.io~1redirection");
        ensure!(
            found.and_then(Value::as_str) == Some("enabled"),
            "{found:?}"
        );
        anyhow::Ok(())
    })
    .unwrap();
    for service in integration::SERVICES {
        deployed.node.stop(service, Signal::SIGKILL).unwrap();
        deployed.start_service(service).unwrap();
        deployed.node.ready().unwrap();
        works();
    }
    let explained = Command::new(deployed.program("inpod"))
        .arg("--run-dir")
        .arg(deployed.node.run_dir())
        .args(["explain", &format!("{namespace}/{}", names[0])])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&explained.stdout);
    assert!(
        explained.status.success() && text.contains("in sync"),
        "{explained:?}"
    );
    // While pod-events is away, the plugin records the DEL by the same names.
    deployed.node.stop("pod-events", Signal::SIGKILL).unwrap();
    deployed.terminate(&[inside]).unwrap();
    drop(processes);
    deployed.call(Call::del, inside).unwrap().succeed().unwrap();
    deployed.start_service("pod-events").unwrap();
    eventually("the DEL is acted on", TIMEOUT, || {
        let claims = deployed.node.api().claims()?;
        ensure!(claims.is_empty(), "{claims:?}");
        anyhow::Ok(())
    })
    .unwrap();
}
