//! Forwards every gRPC call to the real service, and holds a selected call before or after the service handles it.

use std::{
    convert::Infallible,
    fs,
    marker::PhantomData,
    path::Path,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, Sender, channel},
    },
    task::{Context, Poll},
};

use anyhow::Context as _;
use inpod_proto::{
    netconfig::v1::netconfig_service_server::NetconfigServiceServer,
    podevents::v1::pod_events_service_server::PodEventsServiceServer,
    ztunnelbroker::v1::ztunnel_broker_service_server::ZtunnelBrokerServiceServer,
};
use tokio::{net::UnixListener, runtime::Runtime, sync::oneshot};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Status, body::Body, server::NamedService, service::Routes, transport::Channel};
use tower::{Service, ServiceExt as _};

use crate::TIMEOUT;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Before the service receives the call.
    Before,
    /// After the answer of the service, before the caller receives it.
    After,
}

/// A point in an ADD or DEL at which a call can be held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    pub method: &'static str,
    pub moment: Moment,
}

#[derive(Debug)]
pub struct Proxy {
    hook: Hook,
    _runtime: Runtime,
}

#[derive(Debug)]
pub struct Held {
    reached: Receiver<()>,
    go: oneshot::Sender<()>,
}

#[derive(Debug)]
struct Armed {
    step: Step,
    reached: Sender<()>,
    go: oneshot::Receiver<()>,
}

#[derive(Clone, Debug, Default)]
struct Hook(Arc<Mutex<Option<Armed>>>);

impl Proxy {
    /// Starts a proxy between pod-events with the sockets in `front` and the other services with the sockets in
    /// `behind`. The proxy also stands between pod-events and a plugin that calls pod-events in `behind`.
    pub fn start(front: &Path, behind: &Path) -> anyhow::Result<Self> {
        let runtime = Runtime::new().context("no runtime")?;
        let hook = Hook::default();
        {
            let _context = runtime.enter();
            forward::<NetconfigServiceServer<()>>(&hook, front, behind, "netconfig")?;
            forward::<ZtunnelBrokerServiceServer<()>>(&hook, front, behind, "ztunnel-broker")?;
            forward::<PodEventsServiceServer<()>>(&hook, behind, front, "pod-events")?;
        }
        Ok(Self {
            hook,
            _runtime: runtime,
        })
    }

    pub fn hold(&self, step: Step) -> Held {
        let (reached, seen) = channel();
        let (go, gone) = oneshot::channel();
        *self.hook.lock() = Some(Armed {
            step,
            reached,
            go: gone,
        });
        Held { reached: seen, go }
    }
}

impl Held {
    /// Waits until the selected call arrives.
    pub fn reached(&self) -> anyhow::Result<()> {
        self.reached
            .recv_timeout(TIMEOUT)
            .context("the call did not come to the step")
    }

    pub fn release(self) {
        // An error means that the caller is gone.
        self.go.send(()).unwrap_or_default();
    }
}

impl Hook {
    fn lock(&self) -> MutexGuard<'_, Option<Armed>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn pass(&self, method: &str, moment: Moment) {
        let armed = self
            .lock()
            .take_if(|armed| armed.step.method == method && armed.step.moment == moment);
        if let Some(armed) = armed {
            armed.reached.send(()).unwrap_or_default();
            // The end of a test releases every held call.
            armed.go.await.unwrap_or_default();
        }
    }
}

/// Serves the socket of a component below one directory, and forwards to the socket below the other.
fn forward<S: NamedService + 'static>(
    hook: &Hook,
    from: &Path,
    to: &Path,
    component: &str,
) -> anyhow::Result<()> {
    let socket = inpod_service::socket(from, component);
    fs::create_dir_all(socket.parent().context("a socket is in a directory")?)?;
    let listener = UnixListener::bind(&socket)?;
    let service = Forward::<S> {
        hook: hook.clone(),
        channel: inpod_service::channel(&inpod_service::socket(to, component)),
        stands_for: PhantomData,
    };
    let serving = tonic::transport::Server::builder()
        .add_routes(Routes::default().add_service(service))
        .serve_with_incoming(UnixListenerStream::new(listener));
    tokio::spawn(serving);
    Ok(())
}

struct Forward<S> {
    hook: Hook,
    channel: Channel,
    stands_for: PhantomData<fn() -> S>,
}

impl<S> Clone for Forward<S> {
    fn clone(&self) -> Self {
        Self {
            hook: self.hook.clone(),
            channel: self.channel.clone(),
            stands_for: PhantomData,
        }
    }
}

impl<S: NamedService> NamedService for Forward<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<http::Request<Body>> for Forward<S> {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let (hook, channel) = (self.hook.clone(), self.channel.clone());
        let path = request.uri().path().to_owned();
        let method = path.rsplit('/').next().unwrap_or_default().to_owned();
        Box::pin(async move {
            hook.pass(&method, Moment::Before).await;
            let answer = channel.oneshot(request).await;
            hook.pass(&method, Moment::After).await;
            Ok(answer.unwrap_or_else(|error| Status::unavailable(error.to_string()).into_http()))
        })
    }
}
