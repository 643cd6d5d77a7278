//! Descriptors of pods' network namespaces, fetched from netconfig by claim. The broker never opens a path.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use inpod_proto::netconfig::v1::{FetchNetnsFailure, FetchNetnsRequest};
use inpod_types::{Failure, NetnsId, Reason, SandboxRef, with_causes};
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
    fd: Arc<Counted>,
    netns: NetnsId,
}

/// An open descriptor, and a reference for counting open descriptors.
type Counted = (OwnedFd, Arc<()>);

impl Descriptor {
    /// Checks device and inode, because both are readable without entering the netns. netconfig vouches for the cookie.
    fn verify(fd: OwnedFd, netns: NetnsId, open: &Arc<()>) -> Result<Self, Failure> {
        let stat = nix::sys::stat::fstat(&fd).map_err(|error| unavailable(error.to_string()))?;
        if (stat.st_dev, stat.st_ino) != (netns.device, netns.inode) {
            let found = format!("device {}, inode {}", stat.st_dev, stat.st_ino);
            return Err(unavailable(format!(
                "netconfig handed over another netns ({found})"
            )));
        }
        let fd = Arc::new((fd, Arc::clone(open)));
        Ok(Self { fd, netns })
    }

    pub fn netns(&self) -> NetnsId {
        self.netns
    }

    #[cfg(test)]
    pub(crate) fn assumed(fd: OwnedFd, netns: NetnsId) -> Self {
        let fd = Arc::new((fd, Arc::default()));
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
        self.fd.0.as_fd()
    }
}

fn unavailable(message: impl Into<String>) -> Failure {
    Failure::new(Reason::DescriptorUnavailable, message)
}

#[derive(Clone, Debug)]
pub struct Descriptors {
    socket: PathBuf,
    /// The references are one for each open descriptor, and this one.
    open: Arc<()>,
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
        let own = 1;
        u64::try_from(Arc::strong_count(&self.open) - own).unwrap_or(u64::MAX)
    }

    /// Fetches the descriptor of a claimed netns.
    ///
    /// # Errors
    ///
    /// With netconfig's reason if the caller can help by claiming the netns again; otherwise DESCRIPTOR_UNAVAILABLE.
    pub async fn fetch(&self, sandbox: &SandboxRef, netns: NetnsId) -> Result<Descriptor, Failure> {
        let request = FetchNetnsRequest {
            sandbox: Some(sandbox.into()),
            netns: Some(netns.into()),
            keep_open: true,
        };
        let request = request.encode_to_vec();
        let Ok(answer) = timeout(EXCHANGE_TIMEOUT, self.exchange(&request)).await else {
            let seconds = EXCHANGE_TIMEOUT.as_secs();
            return Err(unavailable(format!(
                "netconfig did not answer within {seconds} s"
            )));
        };
        match answer? {
            Answer::Failure(failure) => Err(refused(&failure)),
            Answer::Netns(named, fd) if named == netns.into() => {
                Descriptor::verify(fd, netns, &self.open)
            }
            Answer::Netns(_, _) => Err(unavailable("netconfig's answer names another netns")),
        }
    }

    /// Sends a request on the shared connection, and again on a new connection if the shared connection failed:
    /// netconfig was restarted, or its version closes a connection after each response. A dropped or failed fetch closes
    /// its connection, so that no later fetch receives the response.
    async fn exchange(&self, request: &[u8]) -> Result<Answer, Failure> {
        let shared = timeout(SHARED_CONNECTION_TIMEOUT, self.shared.lock()).await;
        let mut shared = shared.ok();
        let answered = match shared.as_mut().and_then(|shared| shared.take()) {
            Some(held) => held.exchange(request).await.ok(),
            None => None,
        };
        let (answer, connection) = match answered {
            Some(answered) => answered,
            None => {
                let answered = self.connect().await?.exchange(request).await;
                answered.map_err(|error| {
                    unavailable(format!("cannot fetch a descriptor from netconfig: {error}"))
                })?
            }
        };
        if let Some(mut shared) = shared {
            *shared = Some(connection);
        }
        Ok(answer)
    }

    /// Fails if netconfig does not run, or its directory is not mounted.
    async fn connect(&self) -> Result<Connection, Failure> {
        let connection = Connection::open(&self.socket).await;
        connection.map_err(|error| {
            let socket = self.socket.display();
            unavailable(format!(
                "cannot connect to netconfig at {socket}: {}",
                with_causes(&error)
            ))
        })
    }
}

/// Passes on the reasons that the caller can repair by claiming the netns again; everything else is a problem between
/// two services.
fn refused(FetchNetnsFailure { failure, message }: &FetchNetnsFailure) -> Failure {
    let reason = failure
        .as_ref()
        .and_then(|it| Reason::from_number(it.reason));
    let passed = matches!(reason, Some(Reason::ClaimUnknown | Reason::NetnsMismatch));
    let reason = reason.filter(|_| passed);
    Failure::new(
        reason.unwrap_or(Reason::DescriptorUnavailable),
        format!("netconfig refused: {message}"),
    )
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        os::fd::AsRawFd as _,
        sync::atomic::{AtomicU64, Ordering},
        time::Instant,
    };

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

    async fn request(stream: &mut UnixStream) -> std::io::Result<FetchNetnsRequest> {
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
    async fn fetch_from_one_that_sends(count: usize) -> Result<Descriptor, Failure> {
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
                error.message.contains("exactly one descriptor"),
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
        let failure = fetched.unwrap_err();
        assert_eq!(failure.message, "netconfig did not answer within 2 s");
    }

    #[test]
    fn a_descriptor_of_another_netns_is_not_accepted() {
        let fd = File::open("/proc/self/ns/net").unwrap().into();
        let verified = Descriptor::verify(fd, crate::fixture::netns(1), &Arc::default());
        let error = verified.unwrap_err();
        assert!(error.message.contains("another netns"), "{error}");
    }

    #[tokio::test]
    async fn an_absent_netconfig_is_named_with_its_path() {
        let descriptors = Descriptors::new("/nonexistent/netns.sock");
        let (sandbox, netns) = (sandbox("c"), crate::fixture::netns(1));
        let fetched = descriptors.fetch(&sandbox, netns).await;
        let failure = fetched.unwrap_err();
        let expected = "cannot connect to netconfig at /nonexistent/netns.sock: No such file";
        assert!(failure.message.starts_with(expected), "{failure}");
    }
}
