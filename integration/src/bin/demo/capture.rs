//! Captures the packets on a link, like `tcpdump`.

use std::{
    os::fd::{AsRawFd as _, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
};

use anyhow::Context as _;
use inpod_linux::Netns;
use nix::{
    net::if_::if_nametoindex,
    sys::{
        socket::{
            AddressFamily, LinkAddr, SockFlag, SockProtocol, SockType, recvfrom, setsockopt,
            socket, sockopt::ReceiveTimeout,
        },
        time::{TimeVal, TimeValLike as _},
    },
};

/// The time in milliseconds within which a capture without packets stops.
const STOP_MILLISECONDS: i64 = 50;

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Packets {
    /// The number of packets with a payload.
    pub(crate) all: usize,
    /// The number of payloads that begin with the header of a TLS record.
    pub(crate) tls: usize,
    /// The number of payloads that contain the text in the clear.
    pub(crate) readable: usize,
}

pub(crate) struct Capture {
    stop: Arc<AtomicBool>,
    reader: JoinHandle<anyhow::Result<Packets>>,
}

impl Capture {
    /// Captures the IPv4 TCP packets of a link, and searches the packets for a text.
    pub(crate) fn start(netns: &Netns, link: &str, text: String) -> anyhow::Result<Self> {
        let all = SockProtocol::EthAll;
        let open = || {
            let index = if_nametoindex(link)?;
            let flags = SockFlag::SOCK_CLOEXEC;
            socket(AddressFamily::Packet, SockType::Raw, flags, all).map(|it| (it, index))
        };
        let (socket, index) = netns.within(open)?.context("cannot capture packets")?;
        setsockopt(
            &socket,
            ReceiveTimeout,
            &TimeVal::milliseconds(STOP_MILLISECONDS),
        )?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let reader = thread::spawn(move || read(&socket, index, &text, &stopped));
        Ok(Self { stop, reader })
    }

    pub(crate) fn stop(self) -> anyhow::Result<Packets> {
        self.stop.store(true, Ordering::Relaxed);
        self.reader
            .join()
            .ok()
            .context("the capture has panicked")?
    }
}

fn read(socket: &OwnedFd, link: u32, text: &str, stopped: &AtomicBool) -> anyhow::Result<Packets> {
    let mut packets = Packets::default();
    let mut buffer = vec![0; 65536];
    while !stopped.load(Ordering::Relaxed) {
        let (length, address) = match recvfrom::<LinkAddr>(socket.as_raw_fd(), &mut buffer) {
            Ok(received) => received,
            Err(nix::Error::EAGAIN | nix::Error::EINTR) => continue,
            Err(error) => return Err(error).context("cannot read packets"),
        };
        let is_on_link = address.is_some_and(|it| usize::try_from(link) == Ok(it.ifindex()));
        let frame = buffer.get(..length).unwrap_or_default();
        match payload(frame) {
            Some(payload) if is_on_link && !payload.is_empty() => {
                packets.all += 1;
                packets.tls += usize::from(is_tls(payload));
                let contains = payload.windows(text.len()).any(|it| it == text.as_bytes());
                packets.readable += usize::from(contains);
            }
            _ => {}
        }
    }
    Ok(packets)
}

/// Returns whether a payload begins with a TLS record: the type is between change_cipher_spec and application_data, and
/// the version follows (RFC 8446, 5.1).
fn is_tls(payload: &[u8]) -> bool {
    matches!(payload, [20..=23, 3, 1 | 3, ..])
}

/// Returns the TCP payload of an Ethernet frame with IPv4.
fn payload(frame: &[u8]) -> Option<&[u8]> {
    let packet = frame.get(14..)?;
    let is_tcp = frame.get(12..14)? == [8, 0] && *packet.get(9)? == 6;
    let length = u16::from_be_bytes([*packet.get(2)?, *packet.get(3)?]);
    let header = usize::from(packet.first()? & 15) * 4;
    let segment = packet.get(header..length.into())?;
    let payload = segment.get(usize::from(segment.get(12)? >> 4) * 4..)?;
    is_tcp.then_some(payload)
}
