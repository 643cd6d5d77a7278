//! Descriptors of pods' network namespaces, fetched from netconfig by claim. The broker never opens a path.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use inpod_proto::netconfig::v1::{
    FetchNetnsFailure, FetchNetnsRequest, FetchNetnsResponse,
    fetch_netns_response::Result as Answer,
};
use inpod_types::{NetnsId, Reason, SandboxRef};
use prost::Message as _;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
};
use tokio_seqpacket::{UnixSeqpacket, ancillary::OwnedAncillaryMessage};

/// The contract's limit for an exchange with netconfig.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(2);

/// Bounds the memory for a broken netconfig's response; others are far shorter.
const MAX_RESPONSE_BYTES: u32 = 64 * 1024;

/// The descriptor of a verified netns, closed with its last clone.
#[derive(Clone, Debug)]
pub struct Descriptor {
    fd: Arc<CountedFd>,
    netns: NetnsId,
}

#[derive(Debug)]
struct CountedFd {
    fd: OwnedFd,
    open: Arc<AtomicU64>,
}

impl CountedFd {
    fn new(fd: OwnedFd, open: &Arc<AtomicU64>) -> Arc<Self> {
        open.fetch_add(1, Ordering::Relaxed);
        let open = Arc::clone(open);
        Arc::new(Self { fd, open })
    }
}

impl Drop for CountedFd {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Descriptor {
    /// Checks device and inode, which is possible without entering the netns. netconfig vouches for the cookie.
    fn verify(fd: OwnedFd, netns: NetnsId, open: &Arc<AtomicU64>) -> Result<Self, FetchError> {
        let stat = nix::sys::stat::fstat(&fd).map_err(io::Error::from)?;
        if (stat.st_dev, stat.st_ino) != (netns.device, netns.inode) {
            return Err(FetchError::WrongNetns {
                device: stat.st_dev,
                inode: stat.st_ino,
            });
        }
        let fd = CountedFd::new(fd, open);
        Ok(Self { fd, netns })
    }

    pub fn netns(&self) -> NetnsId {
        self.netns
    }

    #[cfg(test)]
    pub(crate) fn assumed(fd: OwnedFd, netns: NetnsId) -> Self {
        let fd = CountedFd::new(fd, &Arc::default());
        Self { fd, netns }
    }
}

#[cfg(test)]
impl Descriptor {
    /// Returns the same descriptor for another netns.
    pub(crate) fn of(&self, netns: NetnsId) -> Self {
        let fd = Arc::clone(&self.fd);
        Self { fd, netns }
    }
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.fd.as_fd()
    }
}

#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// netconfig does not run, or its directory is not mounted.
    #[error("cannot connect to netconfig at {}", .path.display())]
    Connect { path: PathBuf, source: io::Error },
    #[error("cannot fetch a descriptor from netconfig")]
    Exchange(#[from] io::Error),
    #[error("netconfig did not answer within {} s", EXCHANGE_TIMEOUT.as_secs())]
    Timeout,
    #[error("netconfig refused: {message}")]
    Refused {
        /// `None` if this version does not know the reason.
        reason: Option<Reason>,
        message: String,
    },
    #[error("netconfig's answer is malformed: {0}")]
    Malformed(&'static str),
    #[error("netconfig handed over another netns (device {device}, inode {inode})")]
    WrongNetns { device: u64, inode: u64 },
}

#[derive(Clone, Debug)]
pub struct Descriptors {
    socket: PathBuf,
    open: Arc<AtomicU64>,
}

impl Descriptors {
    /// Opens nothing before the first fetch.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            open: Arc::default(),
        }
    }

    /// The number of fetched descriptors that are open.
    pub fn open(&self) -> u64 {
        self.open.load(Ordering::Relaxed)
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    pub async fn fetch(
        &self,
        sandbox: &SandboxRef,
        netns: NetnsId,
    ) -> Result<Descriptor, FetchError> {
        let exchange = tokio::time::timeout(EXCHANGE_TIMEOUT, self.exchange(sandbox, netns));
        let fd = exchange.await.map_err(|_| FetchError::Timeout)??;
        Descriptor::verify(fd, netns, &self.open)
    }

    async fn exchange(&self, sandbox: &SandboxRef, netns: NetnsId) -> Result<OwnedFd, FetchError> {
        let connect = |source| FetchError::Connect {
            path: self.socket.clone(),
            source,
        };
        let mut stream = UnixStream::connect(&self.socket).await.map_err(connect)?;
        let request = FetchNetnsRequest {
            sandbox: Some(sandbox.into()),
            netns: Some(netns.into()),
        };
        write(&mut stream, &request.encode_to_vec()).await?;
        match read(&mut stream).await?.result {
            Some(Answer::Netns(granted)) if granted == netns.into() => receive(stream).await,
            Some(Answer::Netns(_)) => Err(FetchError::Malformed("it names another netns")),
            Some(Answer::Failure(failure)) => Err(to_fetch_error(failure)),
            None => Err(FetchError::Malformed(
                "it has neither a netns nor a failure",
            )),
        }
    }
}

async fn write(stream: &mut UnixStream, message: &[u8]) -> io::Result<()> {
    let length = u32::try_from(message.len()).map_err(io::Error::other)?;
    stream.write_all(&length.to_be_bytes()).await?;
    stream.write_all(message).await
}

async fn read(stream: &mut UnixStream) -> Result<FetchNetnsResponse, FetchError> {
    let length = stream.read_u32().await?;
    if length > MAX_RESPONSE_BYTES {
        return Err(FetchError::Malformed("it is too long"));
    }
    let mut message = vec![0; usize::try_from(length).map_err(io::Error::other)?];
    stream.read_exact(&mut message).await?;
    FetchNetnsResponse::decode(&*message).map_err(|_| FetchError::Malformed("it cannot be decoded"))
}

fn to_fetch_error(FetchNetnsFailure { failure, message }: FetchNetnsFailure) -> FetchError {
    let reason = failure.and_then(|failure| Reason::from_number(failure.reason));
    FetchError::Refused { reason, message }
}

/// Control messages must be aligned like `size_t`.
#[repr(align(8))]
struct Control([u8; 64]);

/// Receives the last byte and its descriptor. The type is made for packets, but `recvmsg` works the same on a stream,
/// and unlike other types it owns what it receives, sets close-on-exec atomically and reports truncation.
async fn receive(stream: UnixStream) -> Result<OwnedFd, FetchError> {
    let socket = UnixSeqpacket::try_from(OwnedFd::from(stream.into_std()?))?;
    let (mut byte, mut control) = ([0], Control([0; 64]));
    let (info, ancillary) = socket
        .recv_with_ancillary(&mut byte, &mut control.0)
        .await?;
    let truncated = info.ancillary_truncated();
    let mut fds: Vec<OwnedFd> = Vec::new();
    for message in ancillary.into_messages() {
        if let OwnedAncillaryMessage::FileDescriptors(received) = message {
            fds.extend(received);
        }
    }
    match (fds.pop(), fds.is_empty() && !truncated) {
        (Some(fd), true) if info.bytes_read() == 1 => Ok(fd),
        _ => Err(FetchError::Malformed(
            "it does not carry exactly one descriptor",
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::File, os::fd::AsRawFd as _};

    use sendfd::SendWithFd as _;

    use super::*;

    /// netconfig grants everything and sends that many descriptors.
    async fn fetch_from_one_that_sends(count: usize) -> Result<Descriptor, FetchError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("netns.sock");
        let listener = tokio::net::UnixListener::bind(&path).unwrap();
        let file = File::open("/proc/self/ns/net").unwrap();
        let stat = nix::sys::stat::fstat(&file).unwrap();
        let netns = NetnsId {
            device: stat.st_dev,
            inode: stat.st_ino,
            cookie: 1,
        };
        let serving = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let answer = FetchNetnsResponse {
                result: Some(Answer::Netns(netns.into())),
            };
            write(&mut stream, &answer.encode_to_vec()).await.unwrap();
            let stream = stream.into_std().unwrap();
            stream
                .send_with_fd(&[0], &vec![file.as_raw_fd(); count])
                .unwrap();
            stream
        };
        let (descriptors, sandbox) = (Descriptors::new(&path), crate::fixture::sandbox("c"));
        tokio::join!(descriptors.fetch(&sandbox, netns), serving).0
    }

    #[tokio::test]
    async fn one_descriptor_is_taken_and_closed_on_exec() {
        let descriptor = fetch_from_one_that_sends(1).await.unwrap();
        let flags = nix::fcntl::fcntl(&descriptor, nix::fcntl::FcntlArg::F_GETFD).unwrap();
        assert_eq!(flags, nix::libc::FD_CLOEXEC);
    }

    #[tokio::test]
    async fn any_other_number_of_descriptors_is_refused() {
        for count in [0, 2, 20] {
            let error = fetch_from_one_that_sends(count).await.unwrap_err();
            assert!(
                matches!(error, FetchError::Malformed(_)),
                "{count}: {error}"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_netconfig_is_given_up_in_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("netns.sock");
        let _listener = tokio::net::UnixListener::bind(&path).unwrap();
        let (sandbox, netns) = (crate::fixture::sandbox("c"), crate::fixture::netns(1));
        let fetched = Descriptors::new(&path).fetch(&sandbox, netns).await;
        assert!(matches!(fetched, Err(FetchError::Timeout)));
    }

    #[test]
    fn a_descriptor_of_another_netns_is_not_accepted() {
        let fd = File::open("/proc/self/ns/net").unwrap().into();
        let error = Descriptor::verify(fd, crate::fixture::netns(1), &Arc::default()).unwrap_err();
        assert!(matches!(error, FetchError::WrongNetns { .. }), "{error}");
    }

    #[tokio::test]
    async fn an_absent_netconfig_is_named_with_its_path() {
        let descriptors = Descriptors::new("/nonexistent/netns.sock");
        let (sandbox, netns) = (crate::fixture::sandbox("c"), crate::fixture::netns(1));
        let fetched = descriptors.fetch(&sandbox, netns).await;
        let error = fetched.unwrap_err().to_string();
        assert_eq!(
            error,
            "cannot connect to netconfig at /nonexistent/netns.sock"
        );
    }
}
