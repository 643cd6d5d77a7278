//! A netlink socket with request, response and timeout.
//!
//! `netlink-socket2` does not suffice: its reads have no timeout, it cannot detect dumps changed meanwhile
//! (`NLM_F_DUMP_INTR`), and it requests an acknowledgement of every message in a transaction. `netlink-bindings`
//! provides the contents of messages.

mod error;
mod message;
pub(crate) mod own;
mod raw;
pub(crate) mod rt;

pub use error::KernelError;
pub(crate) use error::retry_on_race;
pub(crate) use message::Batch;
pub(crate) use raw::RawRequest;

use std::{
    collections::hash_map::RandomState,
    hash::BuildHasher as _,
    io,
    os::fd::{AsRawFd as _, OwnedFd},
    sync::atomic::{AtomicU64, Ordering},
};

use inpod_types::NetnsId;
use netlink_bindings::traits::NetlinkRequest;
use nix::{
    libc,
    sys::{
        socket::{
            AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, setsockopt,
            socket, sockopt,
        },
        time::TimeVal,
    },
};
use nix::{setsockopt_impl, sockopt_impl};

use message::{Answer, DUMP, Message, messages};

/// A timeout that should never pass, because the kernel answers before `send` returns.
const RECEIVE_TIMEOUT_SECONDS: libc::time_t = 5;

/// The maximum size of a chunk of a dump, 32 KiB (netlink_dump in net/netlink/af_netlink.c).
const RECEIVE_BYTES: usize = 32 * 1024;

/// The maximum of memory for the objects of a dump, because a process of the pod with CAP_NET_ADMIN can make any number.
pub(crate) const MAX_DUMP_BYTES: usize = 16 << 20;

sockopt_impl!(
    /// Adds a message to errors (netlink(7)).
    ExtendedAck,
    SetOnly,
    libc::SOL_NETLINK,
    libc::NETLINK_EXT_ACK,
    bool
);

sockopt_impl!(
    /// Removes the request's copy from errors (netlink(7)).
    CappedAck,
    SetOnly,
    libc::SOL_NETLINK,
    libc::NETLINK_CAP_ACK,
    bool
);

/// The number of requests since the start; a transaction counts as one request.
static REQUESTS: AtomicU64 = AtomicU64::new(0);

pub(crate) fn requests() -> u64 {
    REQUESTS.load(Ordering::Relaxed)
}

/// Returns a number for the first message of a socket, so low that numbers do not wrap.
fn random_start() -> u32 {
    let random = RandomState::new().hash_one(()) & 0x3fff_ffff;
    u32::try_from(random).unwrap_or_default()
}

/// A netlink socket, which belongs to the netns in which it was opened even when used from another netns.
#[derive(Debug)]
pub(crate) struct Socket {
    fd: OwnedFd,
    protocol: SockProtocol,
    /// The claimed netns whose notifications of own changes are recognized.
    claimed: Option<NetnsId>,
    sequence: u32,
    buffer: Vec<u8>,
}

impl Socket {
    /// Opens a socket in the calling thread's netns.
    pub(crate) fn open(protocol: SockProtocol) -> io::Result<Self> {
        let fd = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            protocol,
        )?;
        setsockopt(&fd, ExtendedAck, &true)?;
        setsockopt(&fd, CappedAck, &true)?;
        let timeout = TimeVal::new(RECEIVE_TIMEOUT_SECONDS, 0);
        setsockopt(&fd, sockopt::ReceiveTimeout, &timeout)?;
        Ok(Self {
            fd,
            protocol,
            claimed: None,
            sequence: random_start(),
            buffer: vec![0; RECEIVE_BYTES],
        })
    }

    /// Recognizes the notifications of later changes as netconfig's own (see [`own`]). The netns must be the socket's.
    pub(crate) fn set_claimed(&mut self, netns: NetnsId) {
        self.claimed = Some(netns);
    }

    /// Sizes the send buffer, including the kernel's overhead.
    pub(crate) fn set_send_buffer(&self, bytes: usize) -> io::Result<()> {
        // Exceeding the system's limit takes NET_ADMIN.
        let forced = setsockopt(&self.fd, sockopt::SndBufForce, &bytes);
        forced.or_else(|_| setsockopt(&self.fd, sockopt::SndBuf, &bytes))?;
        Ok(())
    }

    pub(crate) fn batch(&self) -> Batch {
        Batch::after(self.sequence)
    }

    /// Sends a request that the kernel only acknowledges.
    pub(crate) fn execute<R: NetlinkRequest>(
        &mut self,
        act: &str,
        request: &R,
    ) -> Result<(), KernelError> {
        self.transact(act, &self.single(request))
    }

    /// Sends a request that changes what the kernel notifies of once.
    pub(crate) fn change<R: NetlinkRequest>(
        &mut self,
        act: &str,
        request: &R,
    ) -> Result<(), KernelError> {
        self.transact_change(act, &self.single(request))
    }

    /// Returns a batch of one message, which the kernel acknowledges.
    fn single<R: NetlinkRequest>(&self, request: &R) -> Batch {
        let mut batch = self.batch();
        batch.push(request);
        batch.acknowledge_last();
        batch
    }

    /// Sends a batch of which the kernel notifies once, and waits like [`Self::transact`].
    pub(crate) fn transact_change(&mut self, act: &str, batch: &Batch) -> Result<(), KernelError> {
        let protocol = self.protocol;
        let source = self.claimed.map(|netns| own::Source { netns, protocol });
        if let Some(source) = source {
            own::expect(source, batch.numbers());
        }
        let result = self.transact(act, batch);
        if let (Err(_), Some(source)) = (&result, source) {
            own::take(source, batch.last());
        }
        result
    }

    /// Sends a batch and waits until the kernel acknowledges the last message.
    pub(crate) fn transact(&mut self, act: &str, batch: &Batch) -> Result<(), KernelError> {
        self.send(act, batch)?;
        let mut refusal = None;
        loop {
            let Ok(received) = self.receive(act) else {
                // A refusal is final even without confirmation of the batch's end.
                return Err(refusal.unwrap_or_else(|| KernelError::no_answer(act)));
            };
            for message in messages(received) {
                match message.answer() {
                    Answer::Ack if batch.is_acknowledged_at(message.sequence) => {
                        return refusal.map_or(Ok(()), Err);
                    }
                    Answer::Error(error) if batch.contains(message.sequence) => {
                        let error = refusal.take().unwrap_or_else(|| error.into_error(act));
                        if batch.ends_with(message.sequence) {
                            return Err(error);
                        }
                        refusal = Some(error);
                    }
                    Answer::Ack | Answer::Error(_) | Answer::Done | Answer::Data => {}
                }
            }
        }
    }

    /// Sends a request and returns the payload of the single response.
    pub(crate) fn get<R: NetlinkRequest>(
        &mut self,
        act: &str,
        request: &R,
    ) -> Result<Vec<u8>, KernelError> {
        let mut batch = self.batch();
        batch.push(request);
        let keep = |payload: &[u8]| Some(payload.to_vec());
        self.collect(act, &batch, |_| true, usize::MAX, keep)?
            .pop()
            .ok_or_else(|| KernelError::no_answer(act))
    }

    /// Returns the payloads of all objects of a type.
    ///
    /// # Errors
    ///
    /// If objects changed during the dump, [`KernelError::is_race`] holds for the error. If the payloads exceed
    /// [`MAX_DUMP_BYTES`], [`KernelError::is_too_large`] holds.
    pub(crate) fn dump<R: NetlinkRequest>(
        &mut self,
        act: &str,
        request: &R,
    ) -> Result<Vec<Vec<u8>>, KernelError> {
        let mut bytes = 0_usize;
        let kept = self.dump_some(act, request, |payload| {
            bytes = bytes.saturating_add(payload.len() + size_of::<Vec<u8>>());
            (bytes <= MAX_DUMP_BYTES).then(|| payload.to_vec())
        })?;
        if bytes <= MAX_DUMP_BYTES {
            Ok(kept)
        } else {
            Err(KernelError::too_large(act, bytes))
        }
    }

    /// Reads all objects of a type, and returns each payload's result of `keep` unless the result is `None`. Objects
    /// without a result take no memory.
    ///
    /// # Errors
    ///
    /// If objects changed during the dump, [`KernelError::is_race`] holds for the error.
    pub(crate) fn dump_some<R: NetlinkRequest, T>(
        &mut self,
        act: &str,
        request: &R,
        keep: impl FnMut(&[u8]) -> Option<T>,
    ) -> Result<Vec<T>, KernelError> {
        self.dump_at_most(act, request, usize::MAX, keep)
    }

    /// Works like [`Self::dump_some`], but reads at most `max` objects.
    ///
    /// # Errors
    ///
    /// If there are more objects, [`KernelError::is_too_large`] holds. The dump then stays open, so that the kernel
    /// refuses further dumps by the socket.
    pub(crate) fn dump_at_most<R: NetlinkRequest, T>(
        &mut self,
        act: &str,
        request: &R,
        max: usize,
        keep: impl FnMut(&[u8]) -> Option<T>,
    ) -> Result<Vec<T>, KernelError> {
        let mut batch = self.batch();
        batch.push_with(request, DUMP);
        self.collect(act, &batch, |_| false, max, keep)
    }

    fn collect<T>(
        &mut self,
        act: &str,
        batch: &Batch,
        is_last: impl Fn(&Message<'_>) -> bool,
        max: usize,
        mut keep: impl FnMut(&[u8]) -> Option<T>,
    ) -> Result<Vec<T>, KernelError> {
        self.send(act, batch)?;
        let (mut found, mut objects, mut interrupted) = (Vec::new(), 0, false);
        loop {
            let received = self.receive(act)?;
            for message in messages(received).filter(|message| batch.contains(message.sequence)) {
                interrupted |= message.is_interrupted();
                let last = match message.answer() {
                    Answer::Error(error) => return Err(error.into_error(act)),
                    Answer::Done | Answer::Ack => true,
                    Answer::Data if objects == max => {
                        return Err(KernelError::too_many(act, max));
                    }
                    Answer::Data => {
                        objects += 1;
                        found.extend(keep(message.payload));
                        is_last(&message)
                    }
                };
                if last {
                    let race = || KernelError::new(act, nix::Error::EINTR);
                    return if interrupted { Err(race()) } else { Ok(found) };
                }
            }
        }
    }

    fn send(&mut self, act: &str, batch: &Batch) -> Result<(), KernelError> {
        REQUESTS.fetch_add(1, Ordering::Relaxed);
        self.sequence = batch.last();
        // Netlink sends a message completely or fails.
        send(self.fd.as_raw_fd(), batch.bytes(), MsgFlags::empty())
            .map(drop)
            .map_err(|errno| KernelError::new(act, errno))
    }

    fn receive(&mut self, act: &str) -> Result<&[u8], KernelError> {
        let length = loop {
            match recv(self.fd.as_raw_fd(), &mut self.buffer, MsgFlags::MSG_TRUNC) {
                Err(nix::Error::EINTR) => {}
                Err(errno) => return Err(KernelError::new(act, errno)),
                Ok(length) => break length,
            }
        };
        // A length above the buffer's would mean truncation, which the size of the buffer rules out.
        self.buffer
            .get(..length)
            .ok_or_else(|| KernelError::new(act, nix::Error::EMSGSIZE))
    }
}
