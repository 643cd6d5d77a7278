//! A netconfig process, with short forms of its calls.

use std::{
    io::{Read as _, Write as _},
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::PathBuf,
    process::{Child, Command},
    sync::Arc,
    time::{Duration, Instant},
};

use inpod_proto::{
    failure_of,
    netconfig::v1::{
        AmbientRedirection, ClaimNetnsRequest, ClaimNetnsResponse, FetchNetnsRequest,
        FetchNetnsResponse, ListClaimsRequest, Redirection, ReleaseNetnsRequest,
        VerifyRulesRequest, netconfig_service_client::NetconfigServiceClient, redirection::Mode,
    },
    types::v1::{NetnsId, NetnsRef, SandboxRef},
};
use inpod_types::Reason;
use prost::Message as _;
use sendfd::RecvWithFd as _;
use tempfile::TempDir;
use tonic::{Code, Status, transport::Channel};

use crate::support::{Fresh, sandbox};

pub(crate) struct Netconfig {
    pub(crate) process: Child,
    pub(crate) run_dir: TempDir,
    pub(crate) client: NetconfigServiceClient<Channel>,
    /// netconfig runs in it and may change it.
    node: Option<Arc<Fresh>>,
}

impl Netconfig {
    pub(crate) async fn start() -> Self {
        Self::start_by(
            Command::new(env!("CARGO_BIN_EXE_netconfig")),
            &["--sweep-seconds", "1"],
        )
        .await
    }

    /// Starts it without one right (capabilities(7), as setpriv(1) names them).
    pub(crate) async fn start_without(right: &str) -> Self {
        let mut command = Command::new("setpriv");
        let program = env!("CARGO_BIN_EXE_netconfig");
        command.args(["--bounding-set", &format!("-{right}"), program]);
        Self::start_by(command, &["--sweep-seconds", "1"]).await
    }

    /// The command executes netconfig in a netns of its own, where it writes the probe set.
    pub(crate) async fn start_by(mut command: Command, arguments: &[&str]) -> Self {
        command.args(arguments);
        Self::start_in(command, Some(Arc::new(Fresh::new())), &[]).await
    }

    /// Nothing may be written in the test's own netns.
    pub(crate) async fn start_beside_the_test() -> Self {
        let program = Command::new(env!("CARGO_BIN_EXE_netconfig"));
        Self::start_in(program, None, &[("INPOD_PROBE_MATCH", "off")]).await
    }

    /// Starts it on a test's node, with additional settings.
    pub(crate) async fn start_on(
        node: Arc<Fresh>,
        settings: &[(&'static str, &'static str)],
    ) -> Self {
        let program = Command::new(env!("CARGO_BIN_EXE_netconfig"));
        Self::start_in(program, Some(node), settings).await
    }

    async fn start_in(
        mut command: Command,
        node: Option<Arc<Fresh>>,
        settings: &[(&'static str, &'static str)],
    ) -> Self {
        let run_dir = tempfile::tempdir().unwrap();
        command
            .env("INPOD_RUN_DIR", run_dir.path())
            .env("INPOD_PEER", "uid")
            .env("INPOD_NETNS_ROOTS", "/proc,/run/netns")
            .env("INPOD_SWEEP_SECONDS", "1")
            .envs(settings.iter().copied());
        let process = match &node {
            Some(node) => node.run(move || command.spawn()),
            None => command.spawn(),
        }
        .unwrap();
        let channel = inpod_service::channel(&inpod_service::socket(run_dir.path(), "netconfig"));
        let mut client = NetconfigServiceClient::new(channel);
        let deadline = Instant::now() + Duration::from_secs(20);
        while client.list_claims(ListClaimsRequest {}).await.is_err() {
            assert!(Instant::now() < deadline, "netconfig does not serve");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Self {
            process,
            run_dir,
            client,
            node,
        }
    }

    pub(crate) fn netns(&self) -> &Fresh {
        self.node.as_ref().unwrap()
    }

    pub(crate) fn socket(&self) -> PathBuf {
        inpod_service::socket(self.run_dir.path(), "netconfig")
    }

    pub(crate) async fn claim(
        &mut self,
        name: &str,
        fresh: &Fresh,
    ) -> Result<ClaimNetnsResponse, Status> {
        self.claim_at(name, netns_ref(fresh), &["10.9.0.1"]).await
    }

    pub(crate) async fn claim_at(
        &mut self,
        name: &str,
        netns: NetnsRef,
        addresses: &[&str],
    ) -> Result<ClaimNetnsResponse, Status> {
        let request = ClaimNetnsRequest {
            sandbox: wire(name),
            netns: Some(netns),
            addresses: addresses.iter().map(ToString::to_string).collect(),
            ..ClaimNetnsRequest::default()
        };
        Ok(self.client.claim_netns(request).await?.into_inner())
    }

    pub(crate) async fn claims(&mut self) -> Vec<String> {
        let response = self.client.list_claims(ListClaimsRequest {}).await.unwrap();
        let claims = response.into_inner().claims.into_iter();
        let sandboxes = claims.map(|claim| claim.sandbox.unwrap().try_into().unwrap());
        sandboxes
            .map(|sandbox: inpod_types::SandboxRef| sandbox.to_string())
            .collect()
    }

    pub(crate) async fn release(&mut self, name: &str) -> bool {
        let request = ReleaseNetnsRequest {
            sandbox: wire(name),
        };
        let response = self.client.release_netns(request).await.unwrap();
        response.into_inner().released
    }

    pub(crate) async fn differences(&mut self, name: &str) -> Vec<String> {
        let request = VerifyRulesRequest {
            sandbox: wire(name),
            redirection: ambient(),
        };
        let response = self.client.verify_rules(request).await.unwrap();
        response.into_inner().differences
    }

    pub(crate) fn fetch(
        &self,
        name: &str,
        netns: NetnsId,
    ) -> (FetchNetnsResponse, Option<OwnedFd>) {
        let mut stream = self.connect_to_netns_sock();
        let request = FetchNetnsRequest {
            sandbox: wire(name),
            netns: Some(netns),
            keep_open: false,
        };
        send(&mut stream, &request);
        let mut length = [0; 4];
        stream.read_exact(&mut length).unwrap();
        let mut bytes = vec![0; u32::from_be_bytes(length).try_into().unwrap()];
        stream.read_exact(&mut bytes).unwrap();
        let descriptor = receive(&stream).1;
        assert!(is_closed(&mut stream));
        (
            FetchNetnsResponse::decode(bytes.as_slice()).unwrap(),
            descriptor,
        )
    }

    pub(crate) fn connect_to_netns_sock(&self) -> UnixStream {
        let stream = UnixStream::connect(self.run_dir.path().join("netns/netns.sock")).unwrap();
        let timeout = Some(Duration::from_secs(10));
        stream.set_read_timeout(timeout).unwrap();
        stream
    }
}

/// Sends a request after which the connection stays, and receives the response in one packet.
pub(crate) fn fetch_on(
    stream: &mut UnixStream,
    name: &str,
    netns: NetnsId,
) -> (FetchNetnsResponse, Option<OwnedFd>) {
    let request = FetchNetnsRequest {
        sandbox: wire(name),
        netns: Some(netns),
        keep_open: true,
    };
    send(stream, &request);
    let (packet, descriptor) = receive(stream);
    let (length, rest) = packet.split_first_chunk().unwrap();
    let (message, rest) = rest.split_at(u32::from_be_bytes(*length).try_into().unwrap());
    assert_eq!(rest.len(), usize::from(descriptor.is_some()));
    (FetchNetnsResponse::decode(message).unwrap(), descriptor)
}

pub(crate) fn is_closed(stream: &mut UnixStream) -> bool {
    stream.read(&mut [0]).unwrap() == 0
}

fn send(stream: &mut UnixStream, request: &FetchNetnsRequest) {
    let bytes = request.encode_to_vec();
    let length = u32::try_from(bytes.len()).unwrap();
    stream.write_all(&length.to_be_bytes()).unwrap();
    stream.write_all(&bytes).unwrap();
}

impl Drop for Netconfig {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

fn receive(stream: &UnixStream) -> (Vec<u8>, Option<OwnedFd>) {
    let (mut bytes, mut descriptors) = (vec![0; 1024], [0; 1]);
    let (length, count) = stream.recv_with_fd(&mut bytes, &mut descriptors).unwrap();
    bytes.truncate(length);
    let descriptor = (count == 1).then(|| {
        let path = format!("/proc/self/fd/{}", descriptors[0]);
        let file = std::fs::File::open(path).unwrap();
        nix::unistd::close(descriptors[0]).unwrap();
        file.into()
    });
    (bytes, descriptor)
}

pub(crate) fn wire(name: &str) -> Option<SandboxRef> {
    Some((&sandbox(name)).into())
}

pub(crate) fn netns_ref(fresh: &Fresh) -> NetnsRef {
    at(fresh.netns.path().to_str().unwrap())
}

pub(crate) fn at(path: &str) -> NetnsRef {
    NetnsRef {
        path: path.to_owned(),
        ..NetnsRef::default()
    }
}

pub(crate) fn ambient() -> Option<Redirection> {
    Some(Redirection {
        mode: Some(Mode::Ambient(AmbientRedirection::default())),
    })
}

pub(crate) fn pod_netns() -> Fresh {
    let fresh = Fresh::new();
    fresh.ip("link add eth0 type veth peer name peer");
    fresh.ip("addr add 10.9.0.1/24 dev eth0");
    fresh.ip("link set eth0 up");
    fresh
}

pub(crate) fn refusal(status: &Status) -> (Code, Reason) {
    (status.code(), failure_of(status).reason)
}
