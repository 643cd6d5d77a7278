//! Plays the agent's side of ZDS, packet by packet and without logic.

use std::fs::File;
use std::io::{self, IoSlice, Read};
use std::os::fd::AsRawFd;
use std::path::Path;

use nix::sys::socket::{ControlMessage, MsgFlags, UnixAddr, sendmsg};
use prost::Message;
use socket2::{Domain, SockAddr, Socket, Type};
use zds_client::proto::workload_request::Payload;
use zds_client::proto::{
    AddWorkload, DelWorkload, KeepWorkload, SnapshotSent, WorkloadInfo, WorkloadRequest,
    WorkloadResponse, workload_response,
};

use crate::network::{DEADLINE, Netns};

pub(crate) const ACK: &str = "";

pub(crate) struct Agent(Socket);

impl Agent {
    pub(crate) fn listen(path: &Path) -> Self {
        let socket = Socket::new(Domain::UNIX, Type::SEQPACKET, None).expect("socket");
        let address = SockAddr::unix(path).expect("a short path");
        socket.bind(&address).expect("bind");
        socket.listen(1).expect("listen");
        // The timeout limits accept as well.
        socket.set_read_timeout(Some(DEADLINE)).expect("timeout");
        Self(socket)
    }

    pub(crate) fn accept_silent(&self) -> Connection {
        let (socket, _) = restart(|| self.0.accept()).expect("a ztunnel");
        socket.set_read_timeout(Some(DEADLINE)).expect("timeout");
        Connection(socket)
    }

    pub(crate) fn accept(&self) -> Connection {
        let mut connection = self.accept_silent();
        assert_eq!(connection.receive(), b"\x08\x01", "the hello");
        connection
    }
}

/// Repeats a call with a timeout, which the kernel does not restart after a signal, such as the signals that glibc itself
/// sends to all threads.
fn restart<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

pub(crate) struct Connection(pub(crate) Socket);

impl Connection {
    pub(crate) fn receive(&mut self) -> Vec<u8> {
        self.try_receive().expect("a packet in time")
    }

    pub(crate) fn try_receive(&mut self) -> io::Result<Vec<u8>> {
        let mut buffer = vec![0; 4096];
        let length = restart(|| self.0.read(&mut buffer))?;
        buffer.truncate(length);
        Ok(buffer)
    }

    pub(crate) fn send(&self, packet: &[u8], descriptors: &[&File]) {
        let descriptors: Vec<_> = descriptors.iter().map(|file| file.as_raw_fd()).collect();
        let rights = [ControlMessage::ScmRights(&descriptors)];
        let control = if descriptors.is_empty() {
            &[]
        } else {
            &rights[..]
        };
        let packet = [IoSlice::new(packet)];
        let none = None::<&UnixAddr>;
        sendmsg(
            self.0.as_raw_fd(),
            &packet,
            control,
            MsgFlags::empty(),
            none,
        )
        .expect("sendmsg");
    }

    pub(crate) fn ack(&mut self) -> String {
        let packet = self.receive();
        let response = WorkloadResponse::decode(&*packet).expect("a response");
        let workload_response::Payload::Ack(ack) = response.payload.expect("an ack");
        ack.error
    }

    fn request(&mut self, payload: Payload, descriptors: &[&File]) -> String {
        self.send(&encode(payload), descriptors);
        self.ack()
    }

    pub(crate) fn add(&mut self, uid: &str, netns: &Netns) -> String {
        self.add_file(uid, &netns.0)
    }

    pub(crate) fn add_file(&mut self, uid: &str, netns: &File) -> String {
        self.request(add(uid), &[netns])
    }

    pub(crate) fn keep(&mut self, uid: &str) -> String {
        let uid = uid.to_owned();
        self.request(Payload::Keep(KeepWorkload { uid }), &[])
    }

    pub(crate) fn del(&mut self, uid: &str) -> String {
        let uid = uid.to_owned();
        self.request(Payload::Del(DelWorkload { uid }), &[])
    }

    pub(crate) fn snapshot_sent(&mut self) -> String {
        self.request(Payload::SnapshotSent(SnapshotSent {}), &[])
    }
}

pub(crate) fn add(uid: &str) -> Payload {
    Payload::Add(AddWorkload {
        uid: uid.to_owned(),
        workload_info: Some(WorkloadInfo {
            name: format!("name-of-{uid}"),
            namespace: "default".to_owned(),
            service_account: uid.to_owned(),
        }),
    })
}

pub(crate) fn encode(payload: Payload) -> Vec<u8> {
    let payload = Some(payload);
    WorkloadRequest { payload }.encode_to_vec()
}
