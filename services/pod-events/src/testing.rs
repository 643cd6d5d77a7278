//! Builders with defaults for everything but the fact under test.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    convert::Infallible,
    error::Error,
    io,
    path::Path,
    sync::{Arc, LazyLock},
    task::{Context, Poll},
    time::Duration,
};

use inpod_service::Trace;
use inpod_types::{NetnsRef, PodRef, Revision, SandboxRef, keys};
use k8s_openapi::api::core::v1::{Container, PodSpec};
use nix::time::{ClockId, clock_gettime};
use serde_json::{Map, Value};
use tokio::{sync::watch, time::Instant};
use tonic::{body::Body, transport::Channel};
use tower::{Service, ServiceExt as _, util::BoxCloneSyncService};

use crate::{
    checkpoint::{Checkpoint, Intent, Record},
    clients::Clients,
    config::{Config, KEYS},
    decide::{Policy, Selectors},
    injection::Injection,
    leave_mode::LeaveMode,
    pod::{Namespace, Pod},
    redirection::{Capture, Permissions, Proxy, Redirection, Requested, Sidecar},
    source::Source,
    status::StatusReporter,
    tasks::{AddCall, Shared, Synced},
};

pub(crate) fn pod(namespace: &str, name: &str) -> Pod {
    Pod {
        pod: PodRef {
            namespace: namespace.parse().unwrap(),
            name: name.parse().unwrap(),
            uid: format!("uid-of-{name}").parse().unwrap(),
        },
        service_account: "default".parse().unwrap(),
        node: None,
        labels: BTreeMap::new(),
        host_network: false,
        runtime_class: None,
        injection: None,
        terminal: false,
        runtime_uid: None,
        requested: Requested::default(),
        ports: Vec::new(),
        mark_setters: Vec::new(),
        addresses: Vec::new(),
        redirection: None,
        in_mesh: None,
        is_gated: false,
        is_ready: false,
        is_terminating: false,
    }
}

pub(crate) fn sidecar_of(annotations: &[(&'static str, &str)]) -> Redirection {
    let proxy = Proxy {
        uid: 1337,
        gid: 1337,
        dns: false,
        drop_invalid: false,
    };
    let annotation = |name: &str| annotations.iter().find(|(known, _)| *known == name);
    let sidecar = Sidecar::from_annotations(proxy, |name| annotation(name).map(|(_, text)| *text));
    Redirection::Sidecar(Box::new(sidecar.unwrap()))
}

pub(crate) fn to_sidecar() -> Redirection {
    sidecar_of(&[])
}

pub(crate) fn injection() -> Injection {
    let annotations = [(keys::SIDECAR_STATUS.to_owned(), String::new())].into();
    let spec = PodSpec {
        containers: vec![Container {
            name: "istio-proxy".to_owned(),
            ..Container::default()
        }],
        ..PodSpec::default()
    };
    Injection::detect(None, Some(&annotations), &spec).unwrap()
}

/// Returns a policy that leaves nothing out.
pub(crate) fn policy(selectors: &Selectors) -> Policy<'_> {
    Policy {
        selectors,
        excluded: &[],
        sandboxed: &[],
        pods_may: Permissions::default(),
        sidecars: true,
        is_uninstalling: false,
    }
}

pub(crate) fn capture() -> Capture {
    Capture::default()
}

pub(crate) fn namespace(name: &str) -> Namespace {
    Namespace::unlabeled(name.parse().unwrap())
}

pub(crate) fn sandbox(container_id: &str) -> SandboxRef {
    SandboxRef {
        network_name: "net".parse().unwrap(),
        container_id: container_id.parse().unwrap(),
        ifname: "eth0".parse().unwrap(),
    }
}

pub(crate) fn record(container_id: &str) -> Record {
    Record {
        sandbox: sandbox(container_id),
        pod: pod("shop", "web").pod,
        service_account: "default".parse().unwrap(),
        netns: NetnsRef::from_path("/run/netns/web"),
        netns_id: None,
        addresses: vec!["10.0.0.1".parse().unwrap()],
        revision: Revision(1),
        intent: Intent::Out,
        runtime_uid: None,
        admitted_unenrolled: false,
        redirection: Redirection::default(),
    }
}

pub(crate) fn enrolled() -> Intent {
    Intent::Enrolled {
        fingerprint: "f".to_owned(),
    }
}

pub(crate) fn add_call(container_id: &str) -> AddCall {
    let netns = NetnsRef::from_path("/run/netns/a");
    let deadline = Instant::now() + Duration::from_secs(30);
    let (sandbox, trace) = (sandbox(container_id), Trace::default());
    AddCall::new(sandbox, None, netns, Vec::new(), deadline, trace)
}

pub(crate) fn config(directory: &Path) -> Config {
    let value = |text: &str| match (text.parse::<u64>(), text.parse::<bool>()) {
        (Ok(number), _) => number.into(),
        (_, Ok(parse_bool)) => parse_bool.into(),
        (Err(_), Err(_)) => Value::from(text),
    };
    let given = |key: &inpod_service::Key| match key.name {
        "node_name" => "node-1".into(),
        "pods_from" => format!("dir:{}", directory.display()).into(),
        _ => value(key.default.unwrap_or_default()),
    };
    let all: Map<_, _> = KEYS
        .iter()
        .map(|key| (key.name.to_owned(), given(key)))
        .collect();
    serde_json::from_value(Value::Object(all)).unwrap()
}

/// Creates the shared state without other services, with a directory of manifests.
pub(crate) async fn shared(directory: &Path) -> Arc<Shared> {
    let unreachable = || inpod_service::channel(&directory.join("nobody.sock"));
    let config = config(directory);
    let source = Source::open(&config).await.unwrap();
    let clients = Clients::new(unreachable(), unreachable(), capture());
    let checkpoint = Checkpoint::open(&directory.join("checkpoint")).unwrap();
    let (status, synced) = (
        StatusReporter::disabled(),
        watch::channel(Synced::default()).1,
    );
    let leave_mode = LeaveMode::default();
    Arc::new(Shared::new(
        config, source, status, leave_mode, clients, checkpoint, synced,
    ))
}

type BoxError = Box<dyn Error + Send + Sync>;

type Answer = http::Response<Body>;

/// A connection to another service: a channel, or the service itself in this process.
#[derive(Clone, Debug)]
pub(crate) struct Transport(BoxCloneSyncService<http::Request<Body>, Answer, BoxError>);

impl Transport {
    pub(crate) fn in_process<S>(service: S) -> Self
    where
        S: Service<http::Request<Body>, Response = Answer, Error = Infallible>
            + Clone
            + Send
            + Sync
            + 'static,
        S::Future: Send + 'static,
    {
        Self(BoxCloneSyncService::new(service.map_err(BoxError::from)))
    }
}

impl From<Channel> for Transport {
    fn from(channel: Channel) -> Self {
        Self(BoxCloneSyncService::new(channel.map_err(BoxError::from)))
    }
}

impl Service<http::Request<Body>> for Transport {
    type Response = Answer;
    type Error = BoxError;
    type Future = <BoxCloneSyncService<http::Request<Body>, Answer, BoxError> as Service<
        http::Request<Body>,
    >>::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        self.0.call(request)
    }
}

/// A reading of tokio's clock with the time since boot.
type ClockReading = (Instant, Duration);

/// The clock of the process, from which a paused runtime starts.
static PROCESS_CLOCK: LazyLock<ClockReading> = LazyLock::new(|| {
    let boot = clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from);
    (std::time::Instant::now().into(), boot)
});

type DiskFault = Box<dyn Fn(bool) -> Option<io::Result<()>>>;

thread_local! {
    static CLOCK: Cell<Option<ClockReading>> = const { Cell::new(None) };
    static DISK_FAULT: RefCell<Option<DiskFault>> = const { RefCell::new(None) };
}

/// Returns the time since boot by tokio's clock.
pub(crate) fn since_boot() -> Duration {
    let (read_at, boot) = CLOCK.get().unwrap_or(*PROCESS_CLOCK);
    boot + Instant::now().saturating_duration_since(read_at)
}

/// Sets the current time of the thread's runtime to the given time since boot.
pub(crate) fn set_since_boot(boot: Duration) {
    CLOCK.set(Some((Instant::now(), boot)));
}

/// Returns the result that the checkpoint returns instead of writing or removing a file, if any.
pub(crate) fn disk_fault(removes: bool) -> Option<io::Result<()>> {
    DISK_FAULT.with_borrow(|fault| fault.as_ref().and_then(|fault| fault(removes)))
}

pub(crate) fn set_disk_fault(fault: impl Fn(bool) -> Option<io::Result<()>> + 'static) {
    DISK_FAULT.set(Some(Box::new(fault)));
}
