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

use inpod_proto::netconfig::v1::{FetchNetnsFailure, FetchNetnsRequest};
use inpod_types::{NetnsId, Reason, SandboxRef};
use prost::Message as _;
use tokio::{sync::Mutex, time::timeout};

use crate::netns_connection::{Answer, Connection};

/// The contract's limit for an exchange with netconfig.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(2);

/// The time for which a fetch waits for earlier fetches before it opens a separate connection. An exchange takes far
/// less than a millisecond.
const SHARED_CONNECTION_TIMEOUT: Duration = Duration::from_millis(100);

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
    /// Checks device and inode, because both are readable without entering the netns. netconfig vouches for the cookie.
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
    /// The connection that consecutive fetches share. `None` before the first fetch and after a failed fetch.
    shared: Arc<Mutex<Option<Connection>>>,
}

impl Descriptors {
    /// Creates a fetcher, which opens no connection before the first fetch.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            open: Arc::default(),
            shared: Arc::default(),
        }
    }

    /// Returns the number of fetched descriptors that are open.
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
        let request = FetchNetnsRequest {
            sandbox: Some(sandbox.into()),
            netns: Some(netns.into()),
            keep_open: true,
        };
        let request = request.encode_to_vec();
        match timeout(EXCHANGE_TIMEOUT, self.exchange(&request)).await {
            Err(_) => Err(FetchError::Timeout),
            Ok(Err(error)) => Err(error),
            Ok(Ok(Answer::Failure(failure))) => Err(to_fetch_error(failure)),
            Ok(Ok(Answer::Netns(named, fd))) if named == netns.into() => {
                Descriptor::verify(fd, netns, &self.open)
            }
            Ok(Ok(Answer::Netns(_, _))) => Err(FetchError::Malformed("it names another netns")),
        }
    }

    /// Sends a request on the shared connection, and again on a new connection if netconfig has closed the shared
    /// connection: netconfig was restarted, or its version closes a connection after each response. A dropped or failed
    /// fetch closes its connection, so that no later fetch receives the response.
    async fn exchange(&self, request: &[u8]) -> Result<Answer, FetchError> {
        let shared = timeout(SHARED_CONNECTION_TIMEOUT, self.shared.lock()).await;
        let mut shared = shared.ok();
        let held = shared.as_mut().and_then(|shared| shared.take());
        let (answer, connection) = match held {
            Some(connection) => match connection.exchange(request).await {
                Err(FetchError::Exchange(_)) => self.connect().await?.exchange(request).await?,
                result => result?,
            },
            None => self.connect().await?.exchange(request).await?,
        };
        if let Some(mut shared) = shared {
            *shared = Some(connection);
        }
        Ok(answer)
    }

    async fn connect(&self) -> Result<Connection, FetchError> {
        let connection = Connection::open(&self.socket).await;
        connection.map_err(|source| FetchError::Connect {
            path: self.socket.clone(),
            source,
        })
    }
}

fn to_fetch_error(FetchNetnsFailure { failure, message }: FetchNetnsFailure) -> FetchError {
    let reason = failure.and_then(|failure| Reason::from_number(failure.reason));
    FetchError::Refused { reason, message }
}

#[cfg(test)]
mod tests {
    use std::{fs::File, os::fd::AsRawFd as _, time::Instant};

    use inpod_proto::netconfig::v1::{FetchNetnsResponse, fetch_netns_response};
    use sendfd::SendWithFd as _;
    use tokio::{
        io::AsyncReadExt as _,
        net::{UnixListener, UnixStream},
        task::JoinSet,
    };

    use super::*;
    use crate::{fixture::sandbox, netns_connection::frame};

    fn own_netns() -> (File, NetnsId) {
        let file = File::open("/proc/self/ns/net").unwrap();
        let stat = nix::sys::stat::fstat(&file).unwrap();
        let netns = NetnsId {
            device: stat.st_dev,
            inode: stat.st_ino,
            cookie: 1,
        };
        (file, netns)
    }

    async fn request(stream: &mut UnixStream) -> io::Result<FetchNetnsRequest> {
        let length = stream.read_u32().await?;
        let mut bytes = vec![0; usize::try_from(length).unwrap()];
        stream.read_exact(&mut bytes).await?;
        Ok(FetchNetnsRequest::decode(&*bytes).unwrap())
    }

    /// Grants a request and sends the given number of descriptors.
    async fn grant(stream: &UnixStream, request: &FetchNetnsRequest, count: usize) {
        let result = Some(fetch_netns_response::Result::Netns(request.netns.unwrap()));
        let mut packet = frame(&FetchNetnsResponse { result }.encode_to_vec()).unwrap();
        packet.push(0);
        let (netns, _) = own_netns();
        let fds = vec![netns.as_raw_fd(); count];
        stream.writable().await.unwrap();
        stream.send_with_fd(&packet, &fds).unwrap();
    }

    /// A netconfig that counts its connections and serves a fixed number of requests on each.
    struct Netconfig {
        path: PathBuf,
        accepted: Arc<AtomicU64>,
        serving: JoinSet<()>,
        _dir: tempfile::TempDir,
    }

    impl Netconfig {
        fn start(requests: usize) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let mut netconfig = Self {
                path: dir.path().join("netns.sock"),
                accepted: Arc::default(),
                serving: JoinSet::new(),
                _dir: dir,
            };
            netconfig.serve(requests);
            netconfig
        }

        fn serve(&mut self, requests: usize) {
            let listener = UnixListener::bind(&self.path).unwrap();
            let accepted = Arc::clone(&self.accepted);
            self.serving.spawn(async move {
                let mut connections = JoinSet::new();
                loop {
                    let (mut stream, _) = listener.accept().await.unwrap();
                    accepted.fetch_add(1, Ordering::Relaxed);
                    connections.spawn(async move {
                        for _ in 0..requests {
                            let Ok(request) = request(&mut stream).await else {
                                return;
                            };
                            grant(&stream, &request, 1).await;
                        }
                    });
                }
            });
        }

        async fn restart(&mut self, requests: usize) {
            self.serving.shutdown().await;
            std::fs::remove_file(&self.path).unwrap();
            self.serve(requests);
        }

        fn accepted(&self) -> u64 {
            self.accepted.load(Ordering::Relaxed)
        }
    }

    #[tokio::test]
    async fn every_fetch_uses_the_same_connection_until_netconfig_restarts() {
        let mut netconfig = Netconfig::start(usize::MAX);
        let descriptors = Descriptors::new(&netconfig.path);
        let (sandbox, (_, netns)) = (sandbox("c"), own_netns());
        for _ in 0..20 {
            let fetches = (0..5).map(|_| descriptors.fetch(&sandbox, netns));
            futures_util::future::try_join_all(fetches).await.unwrap();
        }
        assert_eq!(netconfig.accepted(), 1);
        netconfig.restart(usize::MAX).await;
        descriptors.fetch(&sandbox, netns).await.unwrap();
        assert_eq!(netconfig.accepted(), 2);
    }

    #[tokio::test]
    async fn a_netconfig_that_closes_each_connection_after_its_response_loses_no_fetch() {
        let netconfig = Netconfig::start(1);
        let descriptors = Descriptors::new(&netconfig.path);
        for _ in 0..20 {
            let fetched = descriptors.fetch(&sandbox("c"), own_netns().1).await;
            fetched.unwrap();
        }
        assert_eq!(netconfig.accepted(), 20);
    }

    #[tokio::test]
    async fn an_unanswered_fetch_neither_delays_others_for_long_nor_gives_them_its_response() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("netns.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let (descriptors, (_, netns)) = (Descriptors::new(&path), own_netns());
        let (first, second) = (sandbox("first"), sandbox("second"));
        let unanswered = descriptors.fetch(&first, netns);
        let other = async {
            let (mut held, _) = listener.accept().await.unwrap();
            let asked = request(&mut held).await.unwrap();
            let began = Instant::now();
            let serving = async {
                let (mut stream, _) = listener.accept().await.unwrap();
                let request = request(&mut stream).await.unwrap();
                grant(&stream, &request, 1).await;
                request.sandbox
            };
            let (fetched, served) = tokio::join!(descriptors.fetch(&second, netns), serving);
            fetched.unwrap();
            assert_eq!(served, Some((&second).into()));
            assert!(began.elapsed() < EXCHANGE_TIMEOUT / 2);
            (held, asked)
        };
        // The first fetch is dropped, as if its caller had gone, and answered too late.
        let (held, asked) = tokio::select! {
            _ = unanswered => panic!("it was answered"),
            held = other => held,
        };
        drop((held, asked));
        let serving = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let request = request(&mut stream).await.unwrap();
            grant(&stream, &request, 1).await;
        };
        let (fetched, ()) = tokio::join!(descriptors.fetch(&second, netns), serving);
        fetched.unwrap();
    }

    /// Fetches from a netconfig that grants everything and sends the given number of descriptors.
    async fn fetch_from_one_that_sends(count: usize) -> Result<Descriptor, FetchError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("netns.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let serving = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let request = request(&mut stream).await.unwrap();
            grant(&stream, &request, count).await;
            stream
        };
        let (descriptors, sandbox) = (Descriptors::new(&path), sandbox("c"));
        tokio::join!(descriptors.fetch(&sandbox, own_netns().1), serving).0
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
        let _listener = UnixListener::bind(&path).unwrap();
        let (sandbox, netns) = (sandbox("c"), crate::fixture::netns(1));
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
        let (sandbox, netns) = (sandbox("c"), crate::fixture::netns(1));
        let fetched = descriptors.fetch(&sandbox, netns).await;
        let error = fetched.unwrap_err().to_string();
        assert_eq!(
            error,
            "cannot connect to netconfig at /nonexistent/netns.sock"
        );
    }
}
