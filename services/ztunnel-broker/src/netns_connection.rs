//! A connection to netconfig's `netns.sock` (`proto/inpod/netconfig/v1/netns_socket.proto`).

use std::{io, os::fd::OwnedFd, path::Path};

use inpod_proto::{
    netconfig::v1::{FetchNetnsFailure, FetchNetnsResponse, fetch_netns_response::Result as Found},
    types::v1::NetnsId,
};
use prost::Message as _;
use tokio::net::UnixStream;
use tokio_seqpacket::{
    UnixSeqpacket,
    ancillary::{AncillaryMessageReader, OwnedAncillaryMessage},
};

/// Bounds the memory for the response of a broken netconfig; correct responses are far shorter.
const MAX_RESPONSE_BYTES: u32 = 64 * 1024;

#[derive(Debug)]
pub(crate) enum Answer {
    Netns(NetnsId, OwnedFd),
    Failure(FetchNetnsFailure),
}

/// A connected stream socket. The type is made for packets, but `recvmsg` works the same on a stream. Unlike other
/// types, it owns the received descriptors, sets close-on-exec atomically and reports truncation.
#[derive(Debug)]
pub(crate) struct Connection(UnixSeqpacket);

impl Connection {
    pub(crate) async fn open(path: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(path).await?;
        Ok(Self(OwnedFd::from(stream.into_std()?).try_into()?))
    }

    /// Sends a request and returns its answer and the connection, which is closed after a failure.
    pub(crate) async fn exchange(self, request: &[u8]) -> io::Result<(Answer, Self)> {
        let packet = frame(request)?;
        if self.0.send(&packet).await? < packet.len() {
            return Err(io::ErrorKind::WriteZero.into());
        }
        let answer = self.receive().await?;
        Ok((answer, self))
    }

    /// Receives the response and the descriptor, in one packet or in several.
    async fn receive(&self) -> io::Result<Answer> {
        let (mut bytes, mut fds) = (Vec::new(), Vec::new());
        loop {
            let (mut buffer, mut control) = ([0; 512], Control([0; 64]));
            let received = self.0.recv_with_ancillary(&mut buffer, &mut control.0);
            let (info, ancillary) = received.await?;
            fds.extend(descriptors(ancillary));
            // The kernel has closed the descriptors that did not fit.
            if info.ancillary_truncated() {
                return Err(invalid(ANOTHER_COUNT));
            }
            match buffer.get(..info.bytes_read()) {
                Some([]) | None => return Err(io::ErrorKind::UnexpectedEof.into()),
                Some(received) => bytes.extend_from_slice(received),
            }
            match (parse(&bytes)?, fds.pop()) {
                (None, fd) => fds.extend(fd),
                (Some(Found::Netns(netns)), Some(fd)) if fds.is_empty() => {
                    return Ok(Answer::Netns(netns, fd));
                }
                (Some(Found::Failure(failure)), None) => return Ok(Answer::Failure(failure)),
                (Some(_), _) => return Err(invalid(ANOTHER_COUNT)),
            }
        }
    }
}

const ANOTHER_COUNT: &str = "the answer does not carry exactly one descriptor";

fn invalid(problem: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem)
}

/// Control messages must be aligned like `size_t`.
#[repr(align(8))]
struct Control([u8; 64]);

fn descriptors(ancillary: AncillaryMessageReader<'_>) -> impl Iterator<Item = OwnedFd> {
    let fds = ancillary.into_messages().filter_map(|message| {
        let OwnedAncillaryMessage::FileDescriptors(fds) = message else {
            return None;
        };
        Some(fds)
    });
    fds.flatten()
}

pub(crate) fn frame(message: &[u8]) -> io::Result<Vec<u8>> {
    let length = u32::try_from(message.len()).map_err(io::Error::other)?;
    Ok([&length.to_be_bytes(), message].concat())
}

/// Returns the response; `None` until the response is complete, including the byte that accompanies the descriptor.
fn parse(received: &[u8]) -> io::Result<Option<Found>> {
    let Some((length, rest)) = received.split_first_chunk() else {
        return Ok(None);
    };
    let length = u32::from_be_bytes(*length);
    if length > MAX_RESPONSE_BYTES {
        return Err(invalid("the answer is too long"));
    }
    let Some((message, rest)) =
        rest.split_at_checked(usize::try_from(length).map_err(io::Error::other)?)
    else {
        return Ok(None);
    };
    let response = FetchNetnsResponse::decode(message);
    let response = response.map_err(|_| invalid("the answer cannot be decoded"))?;
    match (response.result, rest) {
        (Some(Found::Netns(_)), []) => Ok(None),
        (Some(found @ Found::Netns(_)), [_]) | (Some(found @ Found::Failure(_)), []) => {
            Ok(Some(found))
        }
        (Some(_), _) => Err(invalid("more follows the answer than announced")),
        (None, _) => Err(invalid("the answer has neither a netns nor a failure")),
    }
}
