//! The part of an API server that `repair` uses: lists, watches, labels, deletions with preconditions, Events. The
//! tiers apiserver and kubernetes have the real one, with the deployed RBAC.

use std::{
    collections::BTreeMap,
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use inpod_linux::Netns;
use serde_json::{Value, json};

const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// For a watch whose request names no duration.
const DEFAULT_WATCH_TIMEOUT: Duration = Duration::from_secs(60);

/// Serves until the test program ends.
#[derive(Debug)]
pub(crate) struct ApiServer {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    version: u64,
    pods: BTreeMap<String, Value>,
    /// Each change as a watch shows it, with its version.
    changes: Vec<(u64, Value)>,
    events: Vec<Value>,
    /// Other requests than lists and watches.
    asked: Vec<String>,
}

struct Request {
    method: String,
    path: String,
    query: BTreeMap<String, String>,
    body: Value,
}

type Answer = (u16, Value);

impl ApiServer {
    /// Listens on a netns's loopback.
    pub(crate) fn start(netns: &Netns) -> anyhow::Result<Self> {
        let listener = netns.within(|| TcpListener::bind("127.0.0.1:0"))??;
        let address = listener.local_addr()?;
        let state = Arc::<Mutex<State>>::default();
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let state = Arc::clone(&shared);
                // A client may disconnect at any time.
                thread::spawn(move || serve(stream, &state).unwrap_or_default());
            }
        });
        Ok(Self { address, state })
    }

    pub(crate) fn kubeconfig(&self) -> String {
        json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "it",
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
            "clusters": [{"name": "it", "cluster": {"server": format!("http://{}", self.address)}}],
            "users": [{"name": "it", "user": {"token": "it"}}],
        })
        .to_string()
    }

    /// Labels that were set meanwhile stay.
    pub(crate) fn show(&self, mut pod: Value) {
        let mut state = lock(&self.state);
        let name = text(&pod, "/metadata/name");
        let known = state.pods.get(&name);
        let labels = known.and_then(|known| known.pointer("/metadata/labels").cloned());
        set(&mut pod, "labels", labels.unwrap_or_else(|| json!({})));
        state.put("MODIFIED", pod);
    }

    pub(crate) fn forget(&self, name: &str) {
        let mut state = lock(&self.state);
        if let Some(pod) = state.pods.get(name).cloned() {
            state.put("DELETED", pod);
            state.pods.remove(name);
        }
    }

    pub(crate) fn pod(&self, name: &str) -> anyhow::Result<Value> {
        let state = lock(&self.state);
        state.pods.get(name).cloned().context("no such pod")
    }

    pub(crate) fn event(&self, reason: &str) -> anyhow::Result<String> {
        let state = lock(&self.state);
        let event = state.events.iter().find(|it| it["reason"] == reason);
        event
            .map(|event| text(event, "/note"))
            .with_context(|| format!("no {reason} in {:?}", state.events))
    }

    pub(crate) fn asked(&self) -> Vec<String> {
        lock(&self.state).asked.clone()
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn text(value: &Value, pointer: &str) -> String {
    let text = value.pointer(pointer).and_then(Value::as_str);
    text.unwrap_or_default().to_owned()
}

fn set(pod: &mut Value, name: &str, value: Value) {
    if let Some(metadata) = pod.pointer_mut("/metadata").and_then(Value::as_object_mut) {
        metadata.insert(name.to_owned(), value);
    }
}

impl State {
    fn put(&mut self, kind: &str, mut pod: Value) -> Value {
        self.version += 1;
        set(&mut pod, "resourceVersion", json!(self.version.to_string()));
        let change = json!({"type": kind, "object": pod});
        self.changes.push((self.version, change));
        self.pods.insert(text(&pod, "/metadata/name"), pod.clone());
        pod
    }

    fn list(&self) -> Value {
        let items: Vec<_> = self.pods.values().collect();
        json!({"apiVersion": "v1", "kind": "PodList", "metadata": {"resourceVersion": self.version.to_string()}, "items": items})
    }

    fn answer(&mut self, request: &Request) -> Answer {
        let parts: Vec<_> = request.path.trim_matches('/').split('/').collect();
        match (request.method.as_str(), parts.as_slice()) {
            ("GET", ["api", "v1", "pods"]) => (200, self.list()),
            ("POST", ["apis", "events.k8s.io", "v1", "namespaces", _, "events"]) => {
                self.events.push(request.body.clone());
                (201, request.body.clone())
            }
            ("PATCH", ["api", "v1", "namespaces", _, "pods", name, "status"]) => {
                self.change(request, name, label)
            }
            ("DELETE", ["api", "v1", "namespaces", _, "pods", name]) => {
                self.change(request, name, delete)
            }
            _ => failed(404, "NotFound"),
        }
    }

    fn change(
        &mut self,
        request: &Request,
        name: &str,
        change: fn(&mut Value, &Value) -> Result<(), &'static str>,
    ) -> Answer {
        let Request { method, path, .. } = request;
        self.asked.push(format!("{method} {path}"));
        let Some(mut pod) = self.pods.get(name).cloned() else {
            return failed(404, "NotFound");
        };
        match change(&mut pod, &request.body) {
            Ok(()) => (200, self.put("MODIFIED", pod)),
            Err(_) => failed(409, "Conflict"),
        }
    }
}

fn failed(code: u16, reason: &str) -> Answer {
    let status = json!({"apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": reason, "code": code, "message": reason});
    (code, status)
}

/// Merges labels if the precondition names this pod.
fn label(pod: &mut Value, patch: &Value) -> Result<(), &'static str> {
    if patch.pointer("/metadata/uid") != pod.pointer("/metadata/uid") {
        return Err("another pod");
    }
    let wanted = patch.pointer("/metadata/labels").and_then(Value::as_object);
    let labels = pod.pointer_mut("/metadata/labels");
    let labels = labels.and_then(Value::as_object_mut).ok_or("no labels")?;
    for (name, value) in wanted.ok_or("no labels are given")? {
        if value.is_null() {
            labels.remove(name);
        } else {
            labels.insert(name.clone(), value.clone());
        }
    }
    Ok(())
}

/// Deletes gracefully if the preconditions match.
fn delete(pod: &mut Value, options: &Value) -> Result<(), &'static str> {
    for name in ["uid", "resourceVersion"] {
        let meant = options.pointer(&format!("/preconditions/{name}"));
        if meant != pod.pointer(&format!("/metadata/{name}")) {
            return Err("not as it was seen");
        }
    }
    set(pod, "deletionTimestamp", json!("2026-01-01T00:00:00Z"));
    Ok(())
}

fn serve(stream: TcpStream, state: &Mutex<State>) -> anyhow::Result<()> {
    let mut writer = stream.try_clone()?;
    let mut reader = BufReader::new(stream);
    loop {
        let request = read(&mut reader)?;
        if request.query.contains_key("watch") {
            return watch(&mut writer, &request, state);
        }
        let (code, body) = lock(state).answer(&request);
        let body = body.to_string();
        write!(
            writer,
            "HTTP/1.1 {code} It\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )?;
    }
}

fn read(reader: &mut BufReader<TcpStream>) -> anyhow::Result<Request> {
    let first = line(reader)?;
    let mut words = first.split(' ');
    let mut word = || words.next().context("no request").map(str::to_owned);
    let (method, target) = (word()?, word()?);
    let mut length = 0;
    loop {
        let header = line(reader)?;
        if header.is_empty() {
            break;
        }
        if let Some((name, value)) = header.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            length = value.trim().parse()?;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    Ok(Request {
        method,
        path: path.to_owned(),
        query: pairs
            .map(|(name, value)| (name.into(), value.into()))
            .collect(),
        body: serde_json::from_slice(&body).unwrap_or_default(),
    })
}

fn line(reader: &mut BufReader<TcpStream>) -> anyhow::Result<String> {
    let mut line = String::new();
    ensure!(reader.read_line(&mut line)? > 0, "the client is gone");
    Ok(line.trim_end().to_owned())
}

/// Sends later changes for the requested time, then closes.
fn watch(writer: &mut TcpStream, request: &Request, state: &Mutex<State>) -> anyhow::Result<()> {
    let asked = |name: &str| request.query.get(name).and_then(|text| text.parse().ok());
    let mut seen: u64 = asked("resourceVersion").unwrap_or_default();
    let end =
        Instant::now() + asked("timeoutSeconds").map_or(DEFAULT_WATCH_TIMEOUT, Duration::from_secs);
    write!(
        writer,
        "HTTP/1.1 200 It\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
    )?;
    while Instant::now() < end {
        let changes = lock(state).changes.clone();
        for (version, change) in changes {
            if version > seen {
                writeln!(writer, "{change}")?;
                seen = version;
            }
        }
        writer.flush()?;
        is_there(writer)?;
        thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

/// Fails if the watch's client, which sends nothing more, has disconnected.
fn is_there(stream: &TcpStream) -> anyhow::Result<()> {
    stream.set_nonblocking(true)?;
    let peeked = stream.peek(&mut [0]);
    stream.set_nonblocking(false)?;
    match peeked {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
        peeked => {
            ensure!(peeked? > 0, "the client is gone");
            Ok(())
        }
    }
}
