//! netconfig with mounts of its own.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command},
    time::{Duration, Instant},
};

use inpod_proto::{
    netconfig::v1::{
        AmbientRedirection, ApplyRulesRequest, ApplyRulesResponse, ClaimNetnsRequest,
        ListClaimsRequest, Redirection, netconfig_service_client::NetconfigServiceClient,
        redirection::Mode,
    },
    types::v1::NetnsRef,
};
use tonic::{Status, transport::Channel};

use crate::support::sandbox;

pub(crate) struct Netconfig {
    pub(crate) process: Child,
    pub(crate) client: NetconfigServiceClient<Channel>,
    run_dir: PathBuf,
    log: PathBuf,
}

/// For actions that normally take no time.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Starts netconfig after mounts in its own mount namespace.
pub(crate) fn command(run_dir: &Path, mounts: &str) -> Command {
    command_in(&["--mount"], run_dir, mounts)
}

/// The same in additional namespaces.
pub(crate) fn command_in(namespaces: &[&str], run_dir: &Path, mounts: &str) -> Command {
    let mut command = Command::new("unshare");
    let inner = format!("{mounts} exec {} \"$@\"", env!("CARGO_BIN_EXE_netconfig"));
    command.args(namespaces);
    command.args(["sh", "-ec", &inner, "netconfig"]);
    command
        .env("INPOD_RUN_DIR", run_dir)
        .env("INPOD_PEER", "uid")
        .env("INPOD_PROBE_MATCH", "off")
        .env("INPOD_LOG_LEVEL", "warn")
        .env("INPOD_NETNS_ROOTS", "/proc,/run/netns");
    command
}

impl Netconfig {
    pub(crate) async fn by(mut command: Command, run_dir: &Path) -> Self {
        let log = run_dir.join("log");
        let process = command
            .stderr(fs::File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let channel = inpod_service::channel(&inpod_service::socket(run_dir, "netconfig"));
        let mut client = NetconfigServiceClient::new(channel);
        let deadline = Instant::now() + TIMEOUT;
        while client.list_claims(ListClaimsRequest {}).await.is_err() {
            assert!(Instant::now() < deadline, "netconfig does not serve");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Self {
            process,
            client,
            run_dir: run_dir.to_owned(),
            log,
        }
    }

    pub(crate) fn is_ready(&self) -> bool {
        let mut check = command(&self.run_dir, "");
        check.arg("--check").output().unwrap().status.success()
    }

    pub(crate) async fn until_ready(&self) {
        let deadline = Instant::now() + TIMEOUT;
        while !self.is_ready() {
            let log = fs::read_to_string(&self.log).unwrap();
            assert!(Instant::now() < deadline, "netconfig is not ready: {log}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub(crate) async fn until_not_ready(&self) {
        let deadline = Instant::now() + TIMEOUT;
        while self.is_ready() {
            assert!(Instant::now() < deadline, "netconfig is still ready");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Waits for a failed preflight check; returns its log line.
    pub(crate) async fn until_refused(&self) -> String {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let log = fs::read_to_string(&self.log).unwrap();
            let is_it = |line: &&str| {
                line.contains("The preflight check failed: ADDs of mesh pods would be refused")
            };
            if let Some(line) = log.lines().find(is_it) {
                return line.to_owned();
            }
            assert!(Instant::now() < deadline, "nothing was refused: {log}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub(crate) async fn claim_at(&mut self, path: &Path) {
        let path = path.to_str().unwrap().to_owned();
        let request = ClaimNetnsRequest {
            sandbox: Some((&sandbox("c1")).into()),
            netns: Some(NetnsRef {
                path,
                ..NetnsRef::default()
            }),
            addresses: vec!["10.9.0.1".to_owned()],
            ..ClaimNetnsRequest::default()
        };
        self.client.claim_netns(request).await.unwrap();
    }

    pub(crate) async fn apply(&mut self) -> Result<ApplyRulesResponse, Status> {
        apply_by(self.client.clone()).await
    }
}

pub(crate) async fn apply_by(
    mut client: NetconfigServiceClient<Channel>,
) -> Result<ApplyRulesResponse, Status> {
    let request = ApplyRulesRequest {
        sandbox: Some((&sandbox("c1")).into()),
        redirection: ambient(),
        probe_addresses: Vec::new(),
        require_listeners: false,
    };
    Ok(client.apply_rules(request).await?.into_inner())
}

impl Drop for Netconfig {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

fn ambient() -> Option<Redirection> {
    Some(Redirection {
        mode: Some(Mode::Ambient(AmbientRedirection::default())),
    })
}
