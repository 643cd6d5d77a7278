//! Plays netconfig's side of `netns.sock` (`inpod/netconfig/v1/netns_socket.proto`) for the namespaces of the kit.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    os::fd::AsRawFd as _,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use inpod_proto::{
    netconfig::v1::{
        FetchNetnsFailure, FetchNetnsRequest, FetchNetnsResponse,
        fetch_netns_response::Result as Answer,
    },
    types::v1::{Failure, Reason},
};
use prost::Message as _;
use sendfd::SendWithFd as _;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{UnixListener, UnixStream},
    time::timeout,
};

use crate::agent::driver::Place;

/// The claimed namespaces by their inode.
pub(super) type Book = BTreeMap<u64, Place>;

/// The time limit of an exchange, from the contract.
const EXCHANGE: Duration = Duration::from_secs(2);

/// The largest request in bytes, from the contract.
const MAX_REQUEST_BYTES: u32 = 4096;

pub(super) fn listen(run_dir: &Path) -> io::Result<UnixListener> {
    let directory = run_dir.join("netns");
    fs::create_dir_all(&directory)?;
    let socket = directory.join("netns.sock");
    match fs::remove_file(&socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => UnixListener::bind(socket),
    }
}

pub(super) async fn serve(listener: UnixListener, book: Arc<Mutex<Book>>) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            continue;
        };
        // The exchange fails if the caller disconnects before the answer.
        drop(timeout(EXCHANGE, hand_out(stream, &book)).await);
    }
}

async fn hand_out(mut stream: UnixStream, book: &Mutex<Book>) -> io::Result<()> {
    let length = stream.read_u32().await?.min(MAX_REQUEST_BYTES);
    let mut request = vec![0; usize::try_from(length).map_err(io::Error::other)?];
    stream.read_exact(&mut request).await?;
    let wanted = FetchNetnsRequest::decode(&*request)
        .map_err(io::Error::other)?
        .netns;
    let place = wanted.and_then(|netns| {
        let book = book.lock().unwrap_or_else(PoisonError::into_inner);
        book.get(&netns.inode).cloned()
    });
    let opened = place.and_then(|place| File::open(place.path).ok());
    let (Some(netns), Some(file)) = (wanted, opened) else {
        return answer(&mut stream, Answer::Failure(unknown_claim())).await;
    };
    answer(&mut stream, Answer::Netns(netns)).await?;
    stream.writable().await?;
    stream
        .into_std()?
        .send_with_fd(&[0], &[file.as_raw_fd()])
        .map(drop)
}

fn unknown_claim() -> FetchNetnsFailure {
    let failure = Failure {
        reason: Reason::ClaimUnknown.into(),
        remedy: "none: the conformance kit does not hold it".to_owned(),
        ..Failure::default()
    };
    FetchNetnsFailure {
        failure: Some(failure),
        message: "no claim is held".to_owned(),
    }
}

async fn answer(stream: &mut UnixStream, result: Answer) -> io::Result<()> {
    let result = Some(result);
    let message = FetchNetnsResponse { result }.encode_to_vec();
    stream
        .write_u32(u32::try_from(message.len()).map_err(io::Error::other)?)
        .await?;
    stream.write_all(&message).await
}
