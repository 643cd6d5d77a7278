//! Connections of a pod with an injected Envoy when the pod is deleted; the test plays the kubelet.

use std::{
    net::{IpAddr, SocketAddr, TcpStream},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use inpod_proto::netconfig::v1::InboundCapture;
use integration::{App, TIMEOUT, ask, connect, exchange, source_seen};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use super::Envoy;
use crate::{
    bootstrap::{arguments, container},
    reachability::Fixture,
    sidecar::redirect,
};

/// The port of the application in the pod.
const POD_PORT: u16 = 7001;

fn hook(container: &Value, pod: IpAddr) -> Option<String> {
    let hook = container.get("lifecycle")?.get("preStop")?;
    let asked = hook["httpGet"].as_object().unwrap();
    assert_eq!(asked.len(), 2, "{asked:?}");
    let to = SocketAddr::new(pod, asked["port"].as_u64()?.try_into().unwrap());
    Some(format!("http://{to}{}", asked["path"].as_str()?))
}

/// Requests it from the node, as the kubelet does; returns the delay.
fn ask_hook(node: &Path, url: &str) -> Duration {
    let net = format!("--net={}", node.display());
    let began = Instant::now();
    let reported = integration::run("nsenter", &[&net, "curl", "-sSfgm", "20", url]);
    assert_eq!(reported.unwrap(), "");
    began.elapsed()
}

/// Opens a connection on which the application answers continuously.
fn open(fixture: &Fixture, to: SocketAddr) -> TcpStream {
    let stream = connect(&fixture.client.netns, to).unwrap();
    let (source, mut stream) = source_seen(stream).unwrap();
    assert!(["127.0.0.6", "::6"].contains(&source.to_string().as_str()));
    exchange(&mut stream, "begun").unwrap();
    stream
}

/// Ends Envoy as a stopped container.
fn end(mut envoy: Envoy<'_>) {
    let pid = Pid::from_raw(envoy.process.id().try_into().unwrap());
    kill(pid, Signal::SIGTERM).unwrap();
    assert!(envoy.process.wait().unwrap().success());
}

fn is_cut(mut stream: TcpStream) -> bool {
    exchange(&mut stream, "still there").is_err()
}

#[test]
fn while_the_hook_of_a_deleted_pod_waits_its_envoy_serves_what_is_there_and_what_is_new() {
    let fixture = Fixture::new();
    redirect(&fixture, InboundCapture::Redirect);
    let said = json!({"proxy.istio.io/config": "terminationDrainDuration: 2s"});
    let container = container(&fixture, &said);
    let envoy = Envoy::with(
        &fixture,
        &container,
        &arguments(&container, fixture.server.v4.into()),
    );
    let _app = App::start(&fixture.server.netns, POD_PORT).unwrap();
    let to = [false, true].map(|v6| SocketAddr::new(fixture.to(false, v6), POD_PORT));
    let mut before = to.map(|to| open(&fixture, to));
    let url = hook(&container, fixture.to(false, false)).unwrap();
    let node = fixture.node.netns().path().to_owned();
    let asked = thread::spawn(move || ask_hook(&node, &url));
    let mut rounds = 0;
    while !asked.is_finished() {
        for (to, stream) in to.into_iter().zip(&mut before) {
            exchange(stream, "in flight").unwrap();
            ask(&fixture.client.netns, to).unwrap();
        }
        rounds += 1;
    }
    assert!(rounds > 1, "{rounds}");
    let took = asked.join().unwrap();
    assert!(took >= Duration::from_secs(2) && took < TIMEOUT, "{took:?}");
    end(envoy);
    for (to, stream) in to.into_iter().zip(before) {
        assert!(is_cut(stream));
        connect(&fixture.client.netns, to).unwrap_err();
    }
}

/// Negative control for the hook.
#[test]
fn without_the_hook_a_connection_ends_with_its_pods_deletion() {
    let fixture = Fixture::new();
    redirect(&fixture, InboundCapture::Redirect);
    let said = json!({"proxy.istio.io/config": "terminationDrainDuration: 0s"});
    let container = container(&fixture, &said);
    let envoy = Envoy::with(
        &fixture,
        &container,
        &arguments(&container, fixture.server.v4.into()),
    );
    let _app = App::start(&fixture.server.netns, POD_PORT).unwrap();
    let to = SocketAddr::new(fixture.to(false, false), POD_PORT);
    let stream = open(&fixture, to);
    assert_eq!(hook(&container, fixture.to(false, false)), None);
    end(envoy);
    assert!(is_cut(stream));
    connect(&fixture.client.netns, to).unwrap_err();
}
