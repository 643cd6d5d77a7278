//! Uses netlink without inpod's code: reads the rules and routes of a pod from the kernel, and writes the same ones
//! into another netns.

use std::{
    os::fd::{AsRawFd as _, OwnedFd},
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use inpod_linux::Netns;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket,
};

const HEADER: usize = 16;
/// NLMSG_DONE ends a dump, and NLMSG_ERROR acknowledges a request.
const DONE: u16 = 3;
const ERROR: u16 = 2;
const REQUEST: u16 = 0x1;
const ACK: u16 = 0x4;
const DUMP: u16 = 0x300;
const CREATE: u16 = 0x400;
const APPEND: u16 = 0x800;

/// The subsystem of nf_tables (linux/netfilter/nfnetlink.h).
const TABLES: u16 = 10 << 8;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;

/// The objects of nf_tables in the order of creation, each with the messages NEW and GET and the attributes that the
/// kernel assigns.
const OBJECTS: [(u16, u16, &[u16]); 3] = [(0, 1, &[3, 4]), (3, 4, &[2, 6, 8]), (6, 7, &[3, 6])];

/// The objects of routing, each with the messages NEW and GET, the length of the fixed part, and the attribute and its
/// value that mark an object of the mesh (FRA_PRIORITY 32764, RTA_TABLE 100).
const ROUTING: [(u16, u16, usize, u16, u32); 2] = [(32, 34, 12, 6, 32764), (24, 26, 12, 15, 100)];

#[derive(Debug)]
struct Message {
    kind: u16,
    body: Vec<u8>,
}

fn encode(kind: u16, flags: u16, body: &[u8]) -> anyhow::Result<Vec<u8>> {
    let length = u32::try_from(HEADER + body.len())?;
    let mut message = length.to_ne_bytes().to_vec();
    message.extend(kind.to_ne_bytes());
    message.extend(flags.to_ne_bytes());
    message.extend([0; 8]);
    message.extend(body);
    message.resize(message.len().next_multiple_of(4), 0);
    Ok(message)
}

fn number(bytes: &[u8], at: usize) -> Option<u16> {
    let bytes = bytes.get(at..)?.first_chunk::<2>()?;
    Some(u16::from_ne_bytes(*bytes))
}

/// Splits received bytes into messages.
fn messages(mut bytes: &[u8]) -> anyhow::Result<Vec<Message>> {
    let mut all = Vec::new();
    while let Some(length) = bytes.first_chunk::<4>() {
        let length = usize::try_from(u32::from_ne_bytes(*length))?;
        let message = bytes.get(HEADER..length).context("a whole message")?;
        let kind = number(bytes, 4).context("a header")?;
        let body = message.to_vec();
        all.push(Message { kind, body });
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(all)
}

/// Splits attributes into their types and their bytes with the header.
fn attributes(mut bytes: &[u8]) -> Vec<(u16, Vec<u8>)> {
    let mut all = Vec::new();
    while let (Some(length), Some(kind)) = (number(bytes, 0), number(bytes, 2)) {
        let padded = usize::from(length.max(4)).next_multiple_of(4);
        let mut whole = bytes
            .get(..usize::from(length))
            .unwrap_or_default()
            .to_vec();
        whole.resize(padded, 0);
        all.push((kind & 0x3fff, whole));
        bytes = bytes.get(padded..).unwrap_or_default();
    }
    all
}

struct Socket(OwnedFd);

impl Socket {
    fn open(protocol: SockProtocol) -> anyhow::Result<Self> {
        let (family, flags) = (AddressFamily::Netlink, SockFlag::SOCK_CLOEXEC);
        Ok(Self(socket(family, SockType::Raw, flags, protocol)?))
    }

    fn send(&self, bytes: &[u8]) -> anyhow::Result<()> {
        send(self.0.as_raw_fd(), bytes, MsgFlags::empty())?;
        Ok(())
    }

    fn receive(&self) -> anyhow::Result<Vec<Message>> {
        let mut buffer = vec![0; 1 << 16];
        let length = recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
        messages(buffer.get(..length).unwrap_or_default())
    }

    fn dump(&self, kind: u16, body: &[u8]) -> anyhow::Result<Vec<Message>> {
        self.send(&encode(kind, REQUEST | DUMP, body)?)?;
        let mut all = Vec::new();
        loop {
            for message in self.receive()? {
                ensure!(message.kind != ERROR, "the kernel refuses a dump");
                if message.kind == DONE {
                    return Ok(all);
                }
                all.push(message);
            }
        }
    }

    fn acknowledged(&self) -> anyhow::Result<()> {
        for message in self.receive()? {
            let code = message.body.first_chunk::<4>().copied();
            let code = i32::from_ne_bytes(code.context("a code")?);
            ensure!(message.kind == ERROR && code == 0, "the kernel: {code}");
        }
        Ok(())
    }
}

/// Returns whether the packet filter in the netns of this thread has tables.
pub(crate) fn has_tables() -> anyhow::Result<bool> {
    let socket = Socket::open(SockProtocol::NetlinkNetFilter)?;
    Ok(!socket.dump(TABLES | 1, &[0; 4])?.is_empty())
}

/// The messages that create the rules and routes of a pod.
#[derive(Debug)]
pub(crate) struct Rules {
    transaction: Vec<u8>,
    routing: Vec<Vec<u8>>,
}

impl Rules {
    pub(crate) fn of(netns: &Netns) -> anyhow::Result<Self> {
        netns.within(Self::read)?
    }

    fn read() -> anyhow::Result<Self> {
        let socket = Socket::open(SockProtocol::NetlinkNetFilter)?;
        let subsystem = [0, 0, 0, 10];
        let mut transaction = encode(BATCH_BEGIN, REQUEST, &subsystem)?;
        let mut last = 0;
        for (new, get, assigned) in OBJECTS {
            let append = if new == 6 { APPEND } else { 0 };
            for found in socket.dump(TABLES | get, &[0; 4])? {
                let (head, rest) = found.body.split_at_checked(4).context("a header")?;
                let mut body = head.to_vec();
                let kept = attributes(rest).into_iter();
                let kept = kept.filter(|(kind, _)| !assigned.contains(kind));
                body.extend(kept.flat_map(|(_, bytes)| bytes));
                last = transaction.len();
                transaction.extend(encode(TABLES | new, REQUEST | CREATE | append, &body)?);
            }
        }
        ensure!(last > 0, "the pod has no rules");
        let flags = transaction.get_mut(last + 6..last + 8).context("flags")?;
        flags.copy_from_slice(&(REQUEST | CREATE | APPEND | ACK).to_ne_bytes());
        transaction.extend(encode(BATCH_END, REQUEST, &subsystem)?);
        let socket = Socket::open(SockProtocol::NetlinkRoute)?;
        let mut routing = Vec::new();
        for (new, get, fixed, key, value) in ROUTING {
            for found in socket.dump(get, &vec![0; fixed])? {
                let mut attributes =
                    attributes(found.body.get(fixed..).unwrap_or_default()).into_iter();
                let wanted = value.to_ne_bytes();
                if attributes.any(|(kind, bytes)| kind == key && bytes.get(4..) == Some(&wanted)) {
                    routing.push(encode(new, REQUEST | CREATE | ACK, &found.body)?);
                }
            }
        }
        Ok(Self {
            transaction,
            routing,
        })
    }

    /// Writes the rules into a netns that has none yet.
    pub(crate) fn write(&self, netns: &Netns) -> anyhow::Result<Duration> {
        let started = Instant::now();
        netns.within(|| {
            let socket = Socket::open(SockProtocol::NetlinkNetFilter)?;
            socket.send(&self.transaction)?;
            socket.acknowledged()?;
            let socket = Socket::open(SockProtocol::NetlinkRoute)?;
            for message in &self.routing {
                socket.send(message)?;
                socket.acknowledged()?;
            }
            anyhow::Ok(())
        })??;
        Ok(started.elapsed())
    }
}
