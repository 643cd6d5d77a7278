//! The behavior of the ztunnel, correct except for the selected fault.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io,
    net::TcpListener,
    os::{fd::OwnedFd, unix::fs::MetadataExt as _},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use nix::sched::{CloneFlags, setns};
use prost::Message as _;
use tokio::{
    runtime::{Builder, Runtime},
    task::JoinSet,
};
use zds_client::proto::{WorkloadRequest, workload_request::Payload};
use zds_conformance::{
    netns::PORTS,
    wire::{self, ACK, Connection, HELLO, Incoming, MAX_REQUEST_BYTES, Packet},
};

use crate::{
    done::Done,
    listeners::{accept, listen},
};

struct Pod {
    identity: (u64, u64),
    _listeners: Listeners,
    _netns: File,
}

/// The listeners of a pod, with or without tasks that accept connections.
enum Listeners {
    Accepting { _tasks: JoinSet<()> },
    Idle { _sockets: Vec<TcpListener> },
}

pub(crate) struct Ztunnel {
    fault: String,
    pods: BTreeMap<String, Pod>,
    pending: BTreeMap<String, File>,
    named: BTreeSet<String>,
    /// The pods that, by a fault, no later Add names.
    deleted: BTreeSet<String>,
    snapshot_sent: bool,
    answers: usize,
    leaked: Vec<OwnedFd>,
    held_back: Option<Vec<u8>>,
    retry_at: Instant,
    runtime: Runtime,
}

impl Ztunnel {
    pub(crate) fn new(fault: String) -> io::Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        Ok(Self {
            runtime,
            fault,
            pods: BTreeMap::new(),
            pending: BTreeMap::new(),
            named: BTreeSet::new(),
            deleted: BTreeSet::new(),
            snapshot_sent: false,
            answers: 0,
            leaked: Vec::new(),
            held_back: None,
            retry_at: Instant::now(),
        })
    }

    fn is(&self, fault: &str) -> bool {
        self.fault == fault
    }

    pub(crate) fn serve(mut self, socket: &Path) -> io::Result<u8> {
        let (mut pause, mut connected_at) = (Duration::from_millis(20), Instant::now());
        let max_pause = Duration::from_secs(if self.is("backoff-of-60s") { 60 } else { 15 });
        loop {
            if self.is("stops-pods-later") && connected_at.elapsed() > Duration::from_secs(5) {
                self.pods.clear();
            }
            match Connection::connect(self.runtime.handle(), socket, Duration::from_secs(5)) {
                Ok(connection) => {
                    pause = Duration::from_millis(20);
                    if let Some(code) = self.converse(&connection)? {
                        return Ok(code);
                    }
                    connected_at = Instant::now();
                    if self.is("no-reconnect") {
                        thread::sleep(Duration::from_secs(3600));
                    }
                }
                Err(_) if self.is("gives-up-early") => return Ok(4),
                Err(_) => {
                    thread::sleep(pause);
                    pause = (pause * 2).min(max_pause);
                }
            }
        }
    }

    /// Serves a connection; returns the exit code if the process must end after this connection.
    fn converse(&mut self, connection: &Connection) -> io::Result<Option<u8>> {
        if !self.is("names-outlive-the-connection") {
            self.named.clear();
        }
        if !self.is("pending-survives") {
            self.pending.clear();
        }
        self.snapshot_sent = false;
        self.held_back = None;
        self.send_hello(connection)?;
        let mut heard = Instant::now();
        loop {
            self.retry();
            match connection.receive(Duration::from_millis(100)) {
                Ok(Incoming::Packet(packet)) if !packet.bytes.is_empty() => {
                    heard = Instant::now();
                    match self.answer(connection, packet)? {
                        Some(Some(code)) => return Ok(Some(code)),
                        Some(None) => break,
                        None => {}
                    }
                }
                Ok(Incoming::Silence) if heard.elapsed() > self.tolerated_silence() => break,
                Ok(Incoming::Silence) => {
                    if self.is("keepalive") {
                        drop(connection.send(ACK, &[]));
                    }
                }
                Ok(Incoming::Packet(_) | Incoming::End) | Err(_) => break,
            }
        }
        if self.is("stop-at-disconnect") {
            self.pods.clear();
        }
        Ok(None)
    }

    fn tolerated_silence(&self) -> Duration {
        match self.fault.as_str() {
            "impatient" => Duration::from_secs(1),
            "gives-up-on-silence" => Duration::from_secs(8),
            _ => Duration::MAX,
        }
    }

    fn send_hello(&self, connection: &Connection) -> io::Result<()> {
        if self.is("hello-late") {
            drop(connection.receive(Duration::from_secs(30))?);
        }
        let hello: &[u8] = match self.fault.as_str() {
            "no-hello" => return Ok(()),
            "wrong-version" => b"\x08\x02",
            "hello-with-unknown-field" => b"\x08\x01\x10\x05",
            _ => HELLO,
        };
        // An error is ignored, because the next call notices a closed connection.
        drop(connection.send(hello, &[]));
        Ok(())
    }

    /// Answers a packet; returns `None` if the connection continues, and otherwise the exit code if the process ends,
    /// too.
    fn answer(
        &mut self,
        connection: &Connection,
        packet: Packet,
    ) -> io::Result<Option<Option<u8>>> {
        let done = self.carry_out(packet);
        self.answers += 1;
        let (bytes, end) = match done {
            Done::Ack => (ACK.to_vec(), None),
            Done::StartFailure(text) => {
                let end = self.is("nack-closes").then_some(None);
                (wire::nack(&format!("failure to start proxy : {text}")), end)
            }
            Done::ReadError(_) if self.is("silent-read-error") => return Ok(Some(None)),
            Done::ReadError(text) => {
                if self.is("read-error-stops-pods") {
                    self.pods.clear();
                }
                let code = self.is("exit-on-read-error").then_some(1);
                (
                    wire::nack(&format!("failure to read message : {text}")),
                    Some(code),
                )
            }
            Done::ProtocolError(text) => {
                let text = format!("failure to process message : ProtocolError({text:?})");
                (wire::nack(&text), Some(Some(1)))
            }
            Done::Mute => return Ok(None),
            Done::Exit => return Ok(Some(Some(1))),
        };
        self.send(connection, &bytes);
        Ok(end)
    }

    fn send(&mut self, connection: &Connection, bytes: &[u8]) {
        let send = |bytes: &[u8]| drop(connection.send(bytes, &[]));
        match self.fault.as_str() {
            "ack-nothing" => {}
            "swallow-one-ack" if self.answers == 5 => {}
            "ack-twice" => {
                send(bytes);
                send(bytes);
            }
            "acks-out-of-order" if bytes != ACK => {
                // The fault delays this answer until after the next.
                self.held_back = Some(bytes.to_vec());
            }
            _ => {
                send(bytes);
                if let Some(held) = self.held_back.take() {
                    send(&held);
                }
            }
        }
    }

    fn carry_out(&mut self, packet: Packet) -> Done {
        let Packet {
            bytes,
            mut descriptors,
        } = packet;
        let room = match self.fault.as_str() {
            "small-buffer" => 512,
            "large-buffer" => 4096,
            _ => MAX_REQUEST_BYTES,
        };
        let refuse = |ztunnel: &mut Self, descriptors: Vec<OwnedFd>, text: &str| {
            if ztunnel.is("leak-refused-fd") {
                ztunnel.leaked.extend(descriptors);
            }
            Done::ReadError(text.to_owned())
        };
        if bytes.len() > room {
            return refuse(self, descriptors, "received truncated message");
        }
        let Ok(request) = WorkloadRequest::decode(&*bytes) else {
            return refuse(self, descriptors, "failed to decode");
        };
        if self.is("strict-fields") && request.encode_to_vec() != bytes {
            return refuse(self, descriptors, "unknown field");
        }
        let Some(payload) = request.payload else {
            return refuse(self, descriptors, "no payload");
        };
        let wanted = usize::from(matches!(payload, Payload::Add(_)));
        if descriptors.is_empty() && wanted == 1 && self.is("no-descriptor-accepted") {
            return Done::Ack;
        }
        if descriptors.len() != wanted {
            return refuse(self, descriptors, "wrong number of descriptors");
        }
        match payload {
            Payload::Add(add) if add.workload_info.is_none() && !self.is("no-info-accepted") => {
                Done::ProtocolError("workload_info is required".into())
            }
            Payload::Add(add) => descriptors
                .pop()
                .map_or(Done::Mute, |netns| self.add(&add.uid, netns.into())),
            Payload::Keep(_) if self.snapshot_sent && !self.is("keep-after-snapshot-accepted") => {
                Done::ProtocolError("keep after the snapshot".into())
            }
            Payload::Keep(keep) => self.keep(keep.uid),
            Payload::Del(del) => self.del(&del.uid),
            Payload::SnapshotSent(_)
                if self.snapshot_sent && !self.is("second-snapshot-accepted") =>
            {
                Done::ProtocolError("second snapshot".into())
            }
            Payload::SnapshotSent(_) => self.complete(),
        }
    }

    fn add(&mut self, uid: &str, netns: File) -> Done {
        if self.is("pending-blocks") && !self.pending.is_empty() {
            return Done::Mute;
        }
        if !self.snapshot_sent && !self.deleted.contains(uid) {
            self.named.insert(uid.to_owned());
        }
        if self.is("pending-add-ignored") && self.pending.contains_key(uid) {
            return Done::Ack;
        }
        if self.is("leak-fd") {
            self.leaked
                .extend(netns.try_clone().ok().map(OwnedFd::from));
        }
        let identity = netns
            .metadata()
            .map(|stat| (stat.dev(), stat.ino()))
            .unwrap_or_default();
        if let Some(pod) = self.pods.get(uid) {
            let same = pod.identity == identity && !self.is("restart-on-same-netns");
            if same || self.is("stay-in-old-netns") {
                return Done::Ack;
            }
            self.pods.remove(uid);
        }
        self.start(uid, netns, identity)
    }

    fn start(&mut self, uid: &str, netns: File, identity: (u64, u64)) -> Done {
        if self.is("ack-before-listening") {
            // The fault opens the listeners later, and too late for an agent with a check after the answer.
            self.pending.insert(uid.to_owned(), netns);
            self.retry_at = Instant::now() + Duration::from_secs(2);
            return Done::Ack;
        }
        match self.open(&netns) {
            Ok(listeners) => {
                let pod = Pod {
                    identity,
                    _listeners: listeners,
                    _netns: netns,
                };
                self.pods.insert(uid.to_owned(), pod);
                self.pending.remove(uid);
                Done::Ack
            }
            Err(error) => {
                self.fail(uid, netns);
                if self.is("ack-start-failures") {
                    Done::Ack
                } else {
                    Done::StartFailure(error.to_string())
                }
            }
        }
    }

    fn fail(&mut self, uid: &str, netns: File) {
        self.pending.insert(uid.to_owned(), netns);
        self.retry_at = Instant::now() + Duration::from_secs(5);
    }

    fn open(&self, netns: &File) -> io::Result<Listeners> {
        let sockets = self.listen(netns)?;
        if self.is("never-accepts") {
            return Ok(Listeners::Idle { _sockets: sockets });
        }
        accept(sockets, self.runtime.handle()).map(|tasks| Listeners::Accepting { _tasks: tasks })
    }

    fn listen(&self, netns: &File) -> io::Result<Vec<TcpListener>> {
        if self.is("listeners-in-own-netns") {
            return listen(&PORTS, &self.fault);
        }
        let ports: &[u16] = if self.is("two-listeners") {
            &[15001, 15006]
        } else {
            &PORTS
        };
        let (opened, fault) = (netns.try_clone()?, self.fault.clone());
        let thread = thread::spawn(move || {
            setns(&opened, CloneFlags::CLONE_NEWNET)?;
            let all = listen(ports, &fault);
            if all.is_err() && fault == "pending-half-open" {
                // The fault leaves two listeners open for ever.
                listen(&[15001, 15006], &fault)?
                    .into_iter()
                    .for_each(std::mem::forget);
            }
            all
        });
        thread
            .join()
            .map_err(|_| io::Error::other("the thread panicked"))?
    }

    fn keep(&mut self, uid: String) -> Done {
        if !self.is("keep-nothing") {
            self.named.insert(uid);
        }
        Done::Ack
    }

    fn del(&mut self, uid: &str) -> Done {
        let known = self.pods.contains_key(uid) || self.pending.contains_key(uid);
        if !known && self.is("exit-on-unknown-del") {
            return Done::Exit;
        }
        if self.is("del-ignored") {
            return Done::Ack;
        }
        if !self.is("pending-survives-del") {
            self.pending.remove(uid);
        }
        if self.snapshot_sent {
            self.pods.remove(uid);
        } else if !self.is("del-in-snapshot-ignored") {
            self.named.remove(uid);
            if self.is("del-in-snapshot-sticks") {
                self.deleted.insert(uid.to_owned());
            }
        }
        Done::Ack
    }

    fn complete(&mut self) -> Done {
        self.snapshot_sent = true;
        if !self.is("never-stop-the-unnamed") {
            let named = std::mem::take(&mut self.named);
            self.pods.retain(|uid, _| named.contains(uid));
        }
        Done::Ack
    }

    fn retry(&mut self) {
        if self.is("stop-before-snapshot-sent") && !self.snapshot_sent && !self.named.is_empty() {
            let named = self.named.clone();
            self.pods.retain(|uid, _| named.contains(uid));
        }
        if self.pending.is_empty() || Instant::now() < self.retry_at {
            return;
        }
        for (uid, netns) in std::mem::take(&mut self.pending) {
            let identity = netns
                .metadata()
                .map(|stat| (stat.dev(), stat.ino()))
                .unwrap_or_default();
            match self.open(&netns) {
                Ok(listeners) => drop(self.pods.insert(
                    uid,
                    Pod {
                        identity,
                        _listeners: listeners,
                        _netns: netns,
                    },
                )),
                Err(_) => self.fail(&uid, netns),
            }
        }
    }
}
