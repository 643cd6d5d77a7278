//! Reads the stand-in for HBONE: an HTTP/1.1 CONNECT in plaintext.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt};

const MAX_HEAD_BYTES: usize = 4096;
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
const END_OF_HEAD: &[u8] = b"\r\n\r\n";

pub(crate) const ACCEPTED: &[u8] = b"HTTP/1.1 200 OK\r\n\r\n";
pub(crate) const REFUSED: &[u8] = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n";
pub(crate) const UNAVAILABLE: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\n\r\n";

#[derive(Debug, thiserror::Error)]
pub(crate) enum RequestError {
    #[error("failed to read the CONNECT request: {0}")]
    Read(#[from] io::Error),
    #[error("not a CONNECT request to an ip:port")]
    Malformed,
}

/// A parsed request, and the bytes that followed the request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ConnectRequest {
    pub(crate) target: SocketAddr,
    pub(crate) early: Vec<u8>,
}

pub(crate) async fn receive(
    stream: &mut (impl AsyncRead + Unpin),
) -> Result<ConnectRequest, RequestError> {
    tokio::time::timeout(HEAD_TIMEOUT, read_head(stream))
        .await
        .map_err(io::Error::from)?
}

async fn read_head(stream: &mut (impl AsyncRead + Unpin)) -> Result<ConnectRequest, RequestError> {
    let mut received = Vec::with_capacity(MAX_HEAD_BYTES);
    loop {
        if let Some(request) = parse(&received)? {
            return Ok(request);
        }
        if stream.read_buf(&mut received).await? == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
    }
}

/// Parses a request; returns `None` if more bytes are needed.
fn parse(received: &[u8]) -> Result<Option<ConnectRequest>, RequestError> {
    let end = received
        .windows(END_OF_HEAD.len())
        .position(|window| window == END_OF_HEAD);
    let Some((head, rest)) = end.and_then(|end| received.split_at_checked(end)) else {
        let too_long = received.len() >= MAX_HEAD_BYTES;
        return if too_long {
            Err(RequestError::Malformed)
        } else {
            Ok(None)
        };
    };
    let target = target(head).ok_or(RequestError::Malformed)?;
    let early = rest.get(END_OF_HEAD.len()..).unwrap_or_default().to_vec();
    Ok(Some(ConnectRequest { target, early }))
}

fn target(head: &[u8]) -> Option<SocketAddr> {
    let line = std::str::from_utf8(head).ok()?.lines().next()?;
    let mut words = line.split(' ');
    let (method, authority, version) = (words.next()?, words.next()?, words.next()?);
    if method != "CONNECT" || version != "HTTP/1.1" || words.next().is_some() {
        return None;
    }
    authority.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_names_its_target_and_keeps_what_follows() {
        let request = parse(b"CONNECT 10.0.0.2:8080 HTTP/1.1\r\nHost: x\r\n\r\nhello")
            .expect("parse")
            .expect("complete");
        assert_eq!(request.target, "10.0.0.2:8080".parse().expect("address"));
        assert_eq!(request.early, b"hello");
    }

    #[test]
    fn an_ipv6_target_is_in_brackets() {
        let request = parse(b"CONNECT [fd00::2]:80 HTTP/1.1\r\n\r\n").expect("parse");
        let target = request.expect("complete").target;
        assert_eq!(target, "[fd00::2]:80".parse().expect("address"));
    }

    #[test]
    fn half_a_request_asks_for_more() {
        assert_eq!(
            parse(b"CONNECT 10.0.0.2:8080 HTTP/1.1\r\n").expect("parse"),
            None
        );
    }

    #[test]
    fn anything_else_is_refused() {
        for head in [
            "GET / HTTP/1.1\r\n\r\n",
            "CONNECT app.example:80 HTTP/1.1\r\n\r\n",
            "CONNECT 10.0.0.2:80 HTTP/2\r\n\r\n",
            "\r\n\r\n",
            &"x".repeat(MAX_HEAD_BYTES),
        ] {
            assert!(parse(head.as_bytes()).is_err(), "{head}");
        }
    }
}
