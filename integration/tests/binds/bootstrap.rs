//! The reachability table with the injector's bootstrap for a proxy without a control plane, which the
//! stand-in proxy follows (`integration/src/bin/sidecar/bootstrap.rs`).

use std::{
    fs,
    io::Write as _,
    net::{IpAddr, SocketAddr},
    os::unix::{fs::PermissionsExt as _, net::UnixListener},
    path::{Path, PathBuf},
    process::Command,
    thread,
};

use inpod_proto::netconfig::v1::InboundCapture;
use integration::bin;
use serde_json::{Value, json};

use crate::{
    bound::{BindAddress, answer, wanted},
    reachability::{BACKENDS, Fixture},
    sidecar::{Proxy, either, redirect, through},
};

pub(crate) fn container(fixture: &Fixture, annotations: &Value) -> Value {
    let manifests = fixture.node.manifests();
    let file = |name: &str| manifests.with_file_name(name);
    let (pod, config) = (file("pod.json"), file("inject.yaml"));
    let manifest = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "server", "annotations": annotations},
        "spec": {"containers": [{"name": "app", "image": "i"}]},
    });
    fs::write(&pod, manifest.to_string()).unwrap();
    fs::write(&config, "defaultTemplates: [standalone]").unwrap();
    let mut inpod = Command::new(bin("inpod").unwrap());
    inpod
        .arg("inject")
        .arg("-f")
        .arg(&pod)
        .arg("--config")
        .arg(&config);
    let output = inpod.output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let injected: Value = serde_saphyr::from_slice(&output.stdout).unwrap();
    let containers = injected["spec"]["containers"].as_array().unwrap();
    let mut proxies = containers.iter().filter(|it| it["name"] == "istio-proxy");
    proxies.next().unwrap().clone()
}

/// Expands the arguments as the kubelet does for this first address.
pub(crate) fn arguments(container: &Value, address: IpAddr) -> Vec<String> {
    let args = container["args"].as_array().unwrap().iter();
    args.map(|arg| {
        let text = arg.as_str().unwrap();
        text.replace("$(INSTANCE_IP)", &address.to_string())
    })
    .collect()
}

pub(crate) fn bootstrap(arguments: &mut [String]) -> &mut String {
    let at = arguments.iter().position(|arg| arg == "--config-yaml");
    &mut arguments[at.unwrap() + 1]
}

fn start(fixture: &Fixture, annotations: &Value) -> Proxy {
    let mut arguments = arguments(&container(fixture, annotations), fixture.server.v4.into());
    let file = fixture.node.manifests().with_file_name("bootstrap.json");
    fs::write(&file, bootstrap(&mut arguments)).unwrap();
    Proxy::start(fixture, &["bootstrap", file.to_str().unwrap()])
}

pub(crate) fn tproxy() -> Value {
    json!({"sidecar.istio.io/interceptionMode": "TPROXY"})
}

#[test]
fn with_the_injectors_bootstrap_who_reaches_an_application_is_the_same_by_every_backend() {
    for backend in BACKENDS {
        let fixture = Fixture::with(backend);
        redirect(&fixture, InboundCapture::Redirect);
        fixture.is_written_with(backend);
        let proxy = start(&fixture, &json!({}));
        let table = through(&fixture, &proxy, either("127.0.0.6", "::6"));
        assert_eq!(table.unwrap(), wanted(), "{backend}");
        assert_eq!(proxy.connections().len(), wanted().len(), "{backend}");
    }
}

#[test]
fn with_the_injectors_bootstrap_by_tproxy_the_application_sees_the_client_by_every_backend() {
    for backend in BACKENDS {
        let fixture = Fixture::with(backend);
        redirect(&fixture, InboundCapture::Tproxy);
        fixture.is_written_with(backend);
        let proxy = start(&fixture, &tproxy());
        let table = through(&fixture, &proxy, |service, v6| fixture.source(service, v6));
        assert_eq!(table.unwrap(), wanted(), "{backend}");
        assert_eq!(proxy.connections().len(), wanted().len(), "{backend}");
    }
}

#[test]
fn by_tproxy_a_proxy_with_the_bootstrap_of_redirect_is_reached_by_nobody_and_it_is_noticed() {
    let fixture = Fixture::new();
    redirect(&fixture, InboundCapture::Tproxy);
    let proxy = start(&fixture, &json!({}));
    for v6 in [false, true] {
        fixture
            .ask(BindAddress::Wildcard.port(), false, v6)
            .unwrap_err();
    }
    assert_eq!(proxy.connections(), []);
}

/// No TCP server gives this port and address.
const BY_SOCKET: &str = "1 192.0.2.1\n";

/// Serves a Unix socket that the proxy's user may open, until the process ends.
fn at_socket(directory: &Path) -> PathBuf {
    fs::set_permissions(directory, fs::Permissions::from_mode(0o755)).unwrap();
    let path = directory.join("app.sock");
    let listener = UnixListener::bind(&path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
    thread::spawn(move || {
        // A client may disconnect.
        for mut stream in listener.incoming().flatten() {
            stream.write_all(BY_SOCKET.as_bytes()).unwrap_or_default();
        }
    });
    path
}

/// Endpoints of every form, one of them at a Unix socket in a directory that this owns.
pub(crate) struct Endpoints {
    _directory: tempfile::TempDir,
    pub(crate) annotation: Value,
}

impl Endpoints {
    pub(crate) fn new() -> Self {
        let mut directory = tempfile::Builder::new();
        let directory = directory.prefix("endpoint-").tempdir().unwrap();
        let socket = at_socket(directory.path());
        let endpoints = format!(
            "8081=127.0.0.1:8082,8082=0.0.0.0:8083,8083=[::1]:9082,9083=[::]:8082,9081=unix://{}",
            socket.display()
        );
        Self {
            _directory: directory,
            annotation: json!({"inpod.io/default-endpoints": endpoints}),
        }
    }

    /// Expects each endpoint's destination and source; `mark` is the source at the pod's first address.
    pub(crate) fn assert_led(&self, fixture: &Fixture, mark: &str) {
        let asked = |port, v6: bool| {
            let to = SocketAddr::new(fixture.to(false, v6), port);
            answer(&fixture.client.netns, to).ok()
        };
        let from = |port: u16, source: &str| Some((port, source.parse::<IpAddr>().unwrap()));
        for v6 in [false, true] {
            // A server at localhost, which no other client reaches.
            assert_eq!(asked(8081, v6), from(8082, "127.0.0.1"));
            assert_eq!(asked(8083, v6), from(9082, "::1"));
            // The pod's first address, whatever the client used: one port is served, one is not.
            assert_eq!(asked(8082, v6), from(8083, mark));
            assert_eq!(asked(9083, v6), None);
            assert_eq!(asked(9081, v6), from(1, "192.0.2.1"));
            // No endpoint names this port.
            assert_eq!(asked(9082, v6), None);
        }
    }
}

#[test]
fn an_endpoint_leads_its_port_elsewhere_in_the_pod_and_no_other_port() {
    let fixture = Fixture::new();
    redirect(&fixture, InboundCapture::Redirect);
    let endpoints = Endpoints::new();
    let _proxy = start(&fixture, &endpoints.annotation);
    endpoints.assert_led(&fixture, "127.0.0.6");
}
