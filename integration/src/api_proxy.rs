//! A proxy in the node's netns between pod-events and the real API server, with faults that a real server does not
//! produce on demand.

mod scripts;
mod upstream;

use std::{
    fs,
    net::Ipv4Addr,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc::channel},
    thread,
    time::Instant,
};

use anyhow::Context as _;
use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
use hyper::{
    Request, Response,
    body::{Bytes, Frame, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use inpod_linux::Netns;
use serde_json::{Value, json};
use tokio::{
    net::TcpListener,
    sync::{mpsc, oneshot, watch},
    task::JoinSet,
    time::sleep,
};
use tokio_stream::wrappers::ReceiverStream;

pub use scripts::{Act, Asked, Cut, Verb};
use upstream::Upstream;

type Body = BoxBody<Bytes, anyhow::Error>;

/// The channel for the parts of an answer; an error breaks the connection.
type Pieces = mpsc::Sender<Result<Frame<Bytes>, anyhow::Error>>;

#[derive(Debug)]
pub struct ApiProxy {
    shared: Arc<Shared>,
    _stop: oneshot::Sender<()>,
}

#[derive(Debug)]
struct Shared {
    upstream: Upstream,
    script: Mutex<Script>,
    hangs: watch::Sender<bool>,
    is_away: watch::Sender<bool>,
    cuts: watch::Sender<Cut>,
}

#[derive(Debug, Default)]
struct Script {
    faults: Vec<Fault>,
    asked: Vec<Asked>,
}

#[derive(Debug)]
struct Fault {
    verb: Verb,
    resource: String,
    times: usize,
    act: Act,
}

impl ApiProxy {
    /// Starts the proxy, and replaces the server's address in the kubeconfig by the proxy's.
    pub fn start(netns: &Netns, kubeconfig: &Path) -> anyhow::Result<Self> {
        let mut config: Value = serde_json::from_slice(&fs::read(kubeconfig)?)?;
        let cluster = config.pointer_mut("/clusters/0/cluster");
        let cluster = cluster.context("a kubeconfig has a cluster")?;
        let shared = Arc::new(Shared {
            upstream: Upstream::of(cluster)?,
            script: Mutex::default(),
            hangs: watch::Sender::new(false),
            is_away: watch::Sender::new(false),
            cuts: watch::Sender::new(Cut::Clean),
        });
        let listener = netns.within(|| std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))??;
        listener.set_nonblocking(true)?;
        *cluster = json!({"server": format!("http://{}", listener.local_addr()?)});
        fs::write(kubeconfig, config.to_string())?;
        let (stop, stopped) = oneshot::channel();
        let (started, start) = channel();
        let serving = Arc::clone(&shared);
        // The thread and its connections stay in the netns.
        netns.within(|| thread::spawn(move || started.send(serve(&serving, listener, stopped))))?;
        // The thread sends a result only at its end, so a result at this point is an error.
        if let Ok(ended) = start.recv_timeout(std::time::Duration::from_millis(50)) {
            ended?;
        }
        Ok(Self {
            shared,
            _stop: stop,
        })
    }

    /// Injects a fault into the next requests; a resource is `pods`, `namespaces`, `nodes` or `*`.
    pub fn fault(&self, verb: Verb, resource: &str, times: usize, act: Act) {
        self.shared.script().faults.push(Fault {
            verb,
            resource: resource.to_owned(),
            times,
            act,
        });
    }

    pub fn heal(&self) {
        self.shared.script().faults.clear();
        self.shared.hangs.send_replace(false);
    }

    /// Holds all traffic, including open watches.
    pub fn hang(&self) {
        self.shared.hangs.send_replace(true);
    }

    /// Closes all connections, and refuses others until the server is back.
    pub fn go_away(&self) {
        self.shared.is_away.send_replace(true);
    }

    pub fn come_back(&self) {
        self.shared.is_away.send_replace(false);
    }

    pub fn open_watches(&self) -> usize {
        self.shared.cuts.receiver_count()
    }

    /// Ends every open watch.
    pub fn cut(&self, kind: Cut) {
        self.shared.cuts.send_replace(kind);
    }

    pub fn asked(&self, verb: Verb, resource: &str) -> Vec<Asked> {
        let script = self.shared.script();
        let asked = script.asked.iter();
        let wanted = asked.filter(|asked| asked.is(verb, resource));
        wanted.cloned().collect()
    }
}

impl Shared {
    fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hear(&self, asked: Asked) -> Act {
        let mut script = self.script();
        let mut faults = script.faults.iter_mut();
        let fault = faults.find(|it| it.times > 0 && asked.is(it.verb, &it.resource));
        let act = fault.map_or(Act::Pass, |fault| {
            fault.times -= 1;
            fault.act
        });
        script.asked.push(asked);
        act
    }

    /// Waits as long as all traffic is held.
    async fn pass(&self) {
        let mut hangs = self.hangs.subscribe();
        hangs
            .wait_for(|hangs| !hangs)
            .await
            .map(drop)
            .unwrap_or_default();
    }

    async fn answer(self: Arc<Self>, request: Request<Incoming>) -> anyhow::Result<Response<Body>> {
        let asked = Asked::of(&request, Instant::now());
        let verb = asked.verb;
        let act = self.hear(asked);
        self.pass().await;
        match act {
            Act::Refuse(code, retry_after) => refuse(code, retry_after),
            Act::ErrorEvent(code) => {
                let event = json!({"type": "ERROR", "object": status(code)});
                Ok(Response::new(whole(format!("{event}\n"))))
            }
            Act::Hang => std::future::pending().await,
            Act::Wait(time) => {
                sleep(time).await;
                self.forward(request, verb, act).await
            }
            Act::Pass | Act::Reverse | Act::Silence | Act::Swallow => {
                self.forward(request, verb, act).await
            }
        }
    }

    async fn forward(
        self: Arc<Self>,
        request: Request<Incoming>,
        verb: Verb,
        act: Act,
    ) -> anyhow::Result<Response<Body>> {
        let (head, body) = self.upstream.ask(request).await?.into_parts();
        if verb == Verb::Watch {
            let (pieces, stream) = mpsc::channel(1);
            let cuts = self.cuts.subscribe();
            tokio::spawn(Arc::clone(&self).pump(body, pieces, act, cuts));
            let body = BodyExt::boxed(StreamBody::new(ReceiverStream::new(stream)));
            return Ok(Response::from_parts(head, body));
        }
        let bytes = body.collect().await?.to_bytes();
        self.pass().await;
        let text = if act == Act::Reverse {
            scripts::reversed(&bytes)?.into()
        } else {
            bytes
        };
        let mut answer = Response::from_parts(head, whole(text));
        answer.headers_mut().remove(http::header::CONTENT_LENGTH);
        Ok(answer)
    }

    async fn pump(
        self: Arc<Self>,
        mut body: Incoming,
        pieces: Pieces,
        act: Act,
        mut cuts: watch::Receiver<Cut>,
    ) {
        let (mut lines, mut in_the_middle) = (Vec::new(), false);
        loop {
            tokio::select! {
                Ok(()) = cuts.changed() => {
                    let cut = *cuts.borrow_and_update();
                    match cut {
                        Cut::Clean => return,
                        Cut::Broken => return broken(&pieces).await,
                        Cut::MidEvent => in_the_middle = true,
                    }
                }
                () = pieces.closed() => return,
                frame = body.frame() => {
                    let data = frame.and_then(Result::ok).and_then(|it| it.into_data().ok());
                    let Some(data) = data else {
                        return end(&pieces, act).await;
                    };
                    lines.extend_from_slice(&data);
                }
            }
            while let Some(mut line) = scripts::line(&mut lines) {
                self.pass().await;
                if act == Act::Silence || (act == Act::Swallow && !scripts::is_bookmark(&line)) {
                    continue;
                }
                if in_the_middle {
                    line.truncate(line.len() / 2);
                }
                // An error means that the client is gone.
                let sent = pieces.send(Ok(Frame::data(line.into()))).await;
                if in_the_middle {
                    // The first half is sent before the connection breaks.
                    sleep(std::time::Duration::from_millis(50)).await;
                    return broken(&pieces).await;
                }
                if sent.is_err() {
                    return;
                }
            }
        }
    }
}

/// Handles the end of a watch by the server; a silent proxy does not report the end.
async fn end(pieces: &Pieces, act: Act) {
    if act == Act::Silence {
        pieces.closed().await;
    }
}

async fn broken(pieces: &Pieces) {
    let error = anyhow::anyhow!("the test breaks the connection");
    pieces.send(Err(error)).await.unwrap_or_default();
}

fn whole(text: impl Into<Bytes>) -> Body {
    Full::new(text.into())
        .map_err(|never| match never {})
        .boxed()
}

fn status(code: u16) -> Value {
    let reason = match code {
        401 => "Unauthorized",
        403 => "Forbidden",
        410 => "Expired",
        429 => "TooManyRequests",
        _ => "InternalError",
    };
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": format!("the test answers {code}"), "reason": reason, "code": code,
    })
}

fn refuse(code: u16, retry_after: Option<u32>) -> anyhow::Result<Response<Body>> {
    let mut answer = Response::builder()
        .status(code)
        .header(http::header::CONTENT_TYPE, "application/json");
    if let Some(seconds) = retry_after {
        answer = answer.header(http::header::RETRY_AFTER, seconds);
    }
    Ok(answer.body(whole(status(code).to_string()))?)
}

fn serve(
    shared: &Arc<Shared>,
    listener: std::net::TcpListener,
    stopped: oneshot::Receiver<()>,
) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let address = listener.local_addr()?;
        let mut listener = TcpListener::from_std(listener)?;
        let mut is_away = shared.is_away.subscribe();
        let serving = async {
            loop {
                tokio::select! {
                    () = accept(shared, &listener) => anyhow::bail!("the proxy accepts no more"),
                    changed = is_away.wait_for(|is_away| *is_away) => changed.map(drop)?,
                }
                drop(listener);
                is_away.wait_for(|is_away| !is_away).await.map(drop)?;
                listener = TcpListener::bind(address).await?;
            }
        };
        tokio::select! {
            ended = serving => ended,
            _ = stopped => Ok(()),
        }
    })
}

/// Serves connections; dropping the future ends all of them.
async fn accept(shared: &Arc<Shared>, listener: &TcpListener) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let shared = Arc::clone(shared);
        let answer = service_fn(move |request| Arc::clone(&shared).answer(request));
        connections.spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), answer));
    }
}
